"""Single completions, each labelled good or bad, to preference pairs: prompt by prompt, the first good one with the
first bad one, the second with the second. What finds no partner in its file is left out. Holds the file in memory.
"""

from collections import defaultdict
from typing import Any

from snaketune.corpus.rows import Dropped, Malformed, Preference
from snaketune.corpus.turns import exchange, kind_of


def paired(raws: list[dict[str, Any]], speakers: dict[str, str]) -> list[Preference | Malformed | Dropped | None]:
    """What becomes of each row, in order: the good one of a pair is the pair, the bad one None.

    Args:
        raws: rows without null columns.
    """
    outcomes: list[Preference | Malformed | Dropped | None] = []
    by_prompt: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    said = []
    for number, raw in enumerate(raws):
        outcomes.append(Dropped("unpaired"))
        said.append(None)
        try:
            prompt, completion, good = _read(raw)
            turns, (answer,), notes = exchange(prompt, {"completion": completion}, speakers)
        except Malformed as error:
            outcomes[number] = error
            continue
        said[number] = (turns, answer, notes)
        by_prompt[repr(turns)][not good].append(number)
    for good, bad in by_prompt.values():
        for chosen, rejected in zip(good, bad):
            turns, answer, notes = said[chosen]
            outcomes[chosen] = Preference(prompt=turns, chosen=answer, rejected=said[rejected][1], notes=notes)
            outcomes[rejected] = None
    return outcomes


def _read(raw: dict[str, Any]) -> tuple[Any, Any, bool]:
    completion = "completion" if "completion" in raw else "response"
    for column in ("prompt", completion, "label"):
        if column not in raw:
            raise Malformed("missing_column", f"no column {column}, or it is null; the row has {', '.join(raw)[:200]}")
    if not isinstance(raw["label"], bool):
        raise Malformed("wrong_type", f"label holds {kind_of(raw['label'])}, expected true or false")
    return raw["prompt"], raw[completion], raw["label"]
