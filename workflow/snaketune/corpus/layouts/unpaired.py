"""Single completions labelled good or bad, unchanged or as preference pairs.

Pairs are made per prompt: the first good completion with the first bad one, the second with the second. The label of a
conversation is that of its last turn.
"""

from collections import defaultdict
from typing import Any

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import Dropped, Malformed, Outcome, Preference, Unpaired, roles_and_texts
from snaketune.corpus.values.labels import tools_of
from snaketune.corpus.values.responses import EXCHANGE, response_of
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of

# Values of a label. True equals 1 and 1.0, so these keys match all three; texts are compared in lower case.
GOOD, BAD = (1, "true", "1", "1.0", "yes", "good"), (0, "false", "0", "0.0", "no", "bad")
LABELS: dict[Any, bool] = dict.fromkeys(GOOD, True) | dict.fromkeys(BAD, False)
LABEL = Column("label", "label kto_tag")


def read(values: Values, file: RowFile) -> Unpaired:
    label = values["label"]
    label = LABELS.get(label.strip().lower() if isinstance(label, str) else label) if _is_scalar(label) else None
    if label is None:
        what = f"{excerpt(values['label'])[:40]}, expected true or false, or 1 or 0"
        raise Malformed("wrong_type", f"{file.names['label']} holds {what}")
    if "messages" in values:
        name = file.names["messages"]
        turns = turns_of(values["messages"], name, file.speakers)
        if turns[-1]["role"] != "assistant":
            raise Malformed(f"ends_on_{turns[-1]['role']}", f"the last turn of {name} isn't the assistant's")
        if len(turns) == 1:
            raise Malformed("turn_out_of_order", f"{name} holds only an answer")
        return Unpaired(prompt=turns[:-1], completion=turns[-1:], label=label)
    prompt, completion, notes = response_of(values, file)
    return Unpaired(prompt=prompt, completion=completion, label=label, notes=notes)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def join(rows: list[Values], file: RowFile) -> list[Outcome]:
    """For the good row of a pair the pair, for the bad one None."""
    outcomes: list[Outcome] = []
    read_rows: dict[int, Unpaired] = {}
    by_prompt: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for number, values in enumerate(rows):
        try:
            row = read_rows[number] = read(values, file)
            # Completions under another system text or with other tools form no pair.
            tools = tools_of(values.get("tools"))
            key = repr((roles_and_texts(row.prompt), values.get("system") or None, tools))
            by_prompt[key][not row.label].append(number)
            outcomes.append(Dropped("unpaired"))
        except Malformed as error:
            outcomes.append(error)
    for good, bad in by_prompt.values():
        for number, other in zip(good, bad):
            better, worse = read_rows[number], read_rows[other]
            outcomes[number] = Preference(
                prompt=better.prompt, chosen=better.completion, rejected=worse.completion, notes=better.notes
            )
            outcomes[other] = None
    return outcomes


MESSAGES = Column("messages", "messages conversations conversation")
SCHEMA = Schema(
    "unpaired",
    read,
    Variant("prompt response label", LABEL, *EXCHANGE, joins=("preferences",)),
    Variant("messages label", LABEL, MESSAGES, joins=("preferences",)),
    kinds=("unpaired", "preferences"),
    join=join,
)
