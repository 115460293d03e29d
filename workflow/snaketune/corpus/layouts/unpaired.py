"""Single completions labelled good or bad, unchanged or as preference pairs.

Pairs are made per prompt: the first good completion with the first bad one, the second with the second. Completions without a
partner in their file are dropped. Pairing holds the file in memory. The label of a conversation is that of its last turn, and
the turns before it are the prompt.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.layouts.exchanges import (
    CONVERSATION_COLUMNS,
    INSTRUCTION_RESPONSES,
    Exchange,
    Raw,
    conversation_exchange,
    instruction_exchange,
    prompt_and_response,
    question_exchange,
)
from snaketune.corpus.layouts.roles import Speakers
from snaketune.corpus.rows import Dropped, Malformed, Message, Preference, Unpaired, roles_and_texts

LABEL_COLUMNS = ("label", "kto_tag")
# Values of a label. True equals 1 and 1.0, so these keys match all three; texts are compared in lower case.
LABEL_VALUES: dict[Any, bool] = {
    1: True,
    "true": True,
    "1": True,
    "1.0": True,
    "yes": True,
    "good": True,
    0: False,
    "false": False,
    "0": False,
    "0.0": False,
    "no": False,
    "bad": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """A completion and whether it is good.

    Attributes:
        context: values of other columns that belong to the prompt; completions with different ones form no pair.
    """

    prompt: list[Message]
    completion: list[Message]
    good: bool
    notes: tuple[str, ...]
    context: str


def label_value(label: Any) -> bool | None:
    """Return True for a good label, False for a bad one; None for any other, such as the name of a class.

    >>> label_value(0), label_value("True"), label_value("greeting")
    (False, True, None)
    """
    if isinstance(label, str):
        return LABEL_VALUES.get(label.strip().lower())
    return LABEL_VALUES.get(label) if isinstance(label, (bool, int, float)) else None


def is_labelled(raw: Raw, layout: str) -> bool:
    """Return True if a row in the layout of a conversation has a label of its quality.

    Read as a plain conversation, the bad ones would be trained on like the good ones. Beside an instruction or a question, a
    number is often the name of a class, so only a boolean counts.
    """
    if "kto_tag" in raw and label_value(raw.get("kto_tag")) is not None:
        return True
    label = raw.get("label")
    if label_value(label) is None:
        return False
    if layout in ("messages", "sharegpt") or isinstance(label, bool):
        return True
    columns = prompt_and_response(tuple(raw)) if layout == "prompt-response" else None
    return columns is not None and (columns[0] == "prompt" or columns[1] == "completion")


def read_labelled(raw: Raw, speakers: Speakers, context: str) -> Labelled:
    """Return a row's completion and label. Raises Malformed if it has no label."""
    column = next((column for column in LABEL_COLUMNS if column in raw), None)
    if column is None:
        raise Malformed("missing_column", f"no column label, or it is null; the row has {', '.join(raw)[:200]}")
    label = raw[column]
    good = label_value(label)
    if good is None:
        raise Malformed("wrong_type", f"{column} holds {excerpt(label)[:40]}, expected true or false, or 1 or 0")
    prompt, completion, notes = _exchange(raw, speakers)
    return Labelled(prompt=prompt, completion=completion, good=good, notes=notes, context=context)


def unpaired_row(row: Labelled | Malformed) -> Unpaired | Malformed:
    """Return a completion as an unpaired row."""
    if isinstance(row, Malformed):
        return row
    return Unpaired(prompt=row.prompt, completion=row.completion, label=row.good, notes=row.notes)


def pair_up(rows: list[Labelled | Malformed]) -> list[Preference | Malformed | Dropped | None]:
    """Return the result for each row, in order: for the good row of a pair the pair, for the bad one None."""
    outcomes: list[Preference | Malformed | Dropped | None] = []
    by_prompt: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, row in enumerate(rows):
        if isinstance(row, Malformed):
            outcomes.append(row)
            continue
        outcomes.append(Dropped("unpaired"))
        by_prompt[repr((roles_and_texts(row.prompt), row.context))][not row.good].append(number)
    for good, bad in by_prompt.values():
        for number, other in zip(good, bad):
            better, worse = rows[number], rows[other]
            outcomes[number] = Preference(
                prompt=better.prompt, chosen=better.completion, rejected=worse.completion, notes=better.notes
            )
            outcomes[other] = None
    return outcomes


def _exchange(raw: Raw, speakers: Speakers) -> Exchange:
    conversation = next((column for column in CONVERSATION_COLUMNS if column in raw), None)
    if conversation:
        return conversation_exchange(raw, conversation, speakers)
    if "instruction" in raw and any(column in raw for column in INSTRUCTION_RESPONSES):
        return instruction_exchange(raw, speakers)
    if prompt_and_response(tuple(raw)) is None:
        for column in ("prompt", "completion"):
            if column not in raw:
                raise Malformed(
                    "missing_column", f"no column {column}, or it is null; the row has {', '.join(raw)[:200]}"
                )
    return question_exchange(raw, speakers)
