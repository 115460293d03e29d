"""Single completions, each labelled good or bad, to preference pairs: prompt by prompt, the first good one with the
first bad one, the second with the second. What finds no partner in its file is left out. Holds the file in memory.
"""

from collections import defaultdict
from typing import Any

from snaketune.corpus.rows import Dropped, Malformed, Preference, excerpt
from snaketune.corpus.turns import exchange

# What a label may be. True equals 1 and 1.0, so these stand for all three; texts are compared in lower case.
VERDICTS: dict[Any, bool] = {
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


def verdict(label: Any) -> bool | None:
    """Whether a label says good or bad; None for any other label, such as the name of a class.

    >>> verdict(0), verdict("True"), verdict("greeting")
    (False, True, None)
    """
    if isinstance(label, str):
        return VERDICTS.get(label.strip().lower())
    return VERDICTS.get(label) if isinstance(label, (bool, int, float)) else None


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
    good = verdict(raw["label"])
    if good is None:
        raise Malformed("wrong_type", f"label holds {excerpt(raw['label'])[:40]}, expected true or false, or 1 or 0")
    return raw["prompt"], raw[completion], good
