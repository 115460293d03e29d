"""Single completions labelled good or bad, unchanged or as preference pairs.

Pairs are made per prompt: the first good completion with the first bad one, the second with the second. The label of a
conversation is that of its last turn.
"""

from collections import defaultdict
from typing import Any

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.layouts import exchanges
from snaketune.corpus.layouts.roles import Speakers
from snaketune.corpus.layouts.values import Raw, column_of
from snaketune.corpus.rows import Dropped, Malformed, Outcome, Preference, Unpaired, roles_and_texts

LABEL_COLUMNS = ("label", "kto_tag")
# Values of a label. True equals 1 and 1.0, so these keys match all three; texts are compared in lower case.
GOOD, BAD = (1, "true", "1", "1.0", "yes", "good"), (0, "false", "0", "0.0", "no", "bad")
LABEL_VALUES: dict[Any, bool] = dict.fromkeys(GOOD, True) | dict.fromkeys(BAD, False)


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
    if label_value(raw.get("kto_tag")) is not None:
        return True
    label = raw.get("label")
    if label_value(label) is None:
        return False
    if layout in ("messages", "sharegpt") or isinstance(label, bool):
        return True
    columns = exchanges.prompt_and_response(tuple(raw)) if layout == "prompt-response" else None
    return columns is not None and (columns[0] == "prompt" or columns[1] == "completion")


def unpaired_row(raw: Raw, speakers: Speakers) -> Unpaired:
    column = next((column for column in LABEL_COLUMNS if column in raw), "label")
    label = label_value(column_of(raw, column))
    if label is None:
        what = f"{excerpt(raw[column])[:40]}, expected true or false, or 1 or 0"
        raise Malformed("wrong_type", f"{column} holds {what}")
    prompt, completion, notes = _exchange(raw, speakers)
    return Unpaired(prompt=prompt, completion=completion, label=label, notes=notes)


def pair_up(rows: list[tuple[Unpaired | Malformed, str]]) -> list[Outcome]:
    """Return the result for each row, in order: for the good row of a pair the pair, for the bad one None.

    Args:
        rows: each with the text of other columns that belong to its prompt; completions with different ones form no pair.
    """
    outcomes: list[Outcome] = []
    by_prompt: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, (row, context) in enumerate(rows):
        if isinstance(row, Malformed):
            outcomes.append(row)
            continue
        outcomes.append(Dropped("unpaired"))
        by_prompt[repr((roles_and_texts(row.prompt), context))][not row.label].append(number)
    for good, bad in by_prompt.values():
        for number, other in zip(good, bad):
            better, worse = rows[number][0], rows[other][0]
            outcomes[number] = Preference(
                prompt=better.prompt, chosen=better.completion, rejected=worse.completion, notes=better.notes
            )
            outcomes[other] = None
    return outcomes


def _exchange(raw: Raw, speakers: Speakers) -> exchanges.Exchange:
    conversation = next((column for column in exchanges.CONVERSATION_COLUMNS if column in raw), None)
    if conversation:
        return exchanges.conversation_exchange(raw, conversation, speakers)
    if "instruction" in raw and any(column in raw for column in exchanges.INSTRUCTION_RESPONSES):
        return exchanges.instruction_exchange(raw, speakers)
    if exchanges.prompt_and_response(tuple(raw)) is None:
        for column in ("prompt", "completion"):
            column_of(raw, column)
    return exchanges.question_exchange(raw, speakers)
