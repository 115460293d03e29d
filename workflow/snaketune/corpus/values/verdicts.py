"""Which of two answers is better: verdicts of one or several judges, strengths, and scores.

annotator1 … annotator3                     0 for a tie, 1, 2                the answer with most votes is better
winner, label, preference …                 model_a, A, A>B, A>>B, [[A]], 1; tie, A=B, [[C]], 1.5, 0
better_response_id                          0, 1, where the answers' columns end in these
preference_strength, overall_preference     below 0 for the first, above for the second, 0 for a tie
score_0, score_1                            the higher score
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import kind_of, may_be_number, number_of
from snaketune.corpus.values.schema import Clue, Column, Name, Samples

ANSWERS = ("response", "output", "answer", "completion", "conversation", "assistant", "human_ref")
SUFFIX_PAIRS = (("_a", "_b"), ("_A", "_B"), ("A", "B"), ("_1", "_2"), ("1", "2"), ("_0", "_1"))
ANSWER_COLUMNS = tuple((f"{name}{first}", f"{name}{second}") for name in ANSWERS for first, second in SUFFIX_PAIRS)
VERDICT_COLUMNS = ("preference", "winner", "label", "choice", "verdict", "better_response_id")
STRENGTH_COLUMNS = ("preference_strength", "overall_preference")
SUFFIX = re.compile(r"_?[abAB012]$")
ANNOTATOR = re.compile(r"annotator_?\d+")
VERDICTS = {"1": 1, "2": 2, "a": 1, "b": 2, "0": 0, "1.5": 0, "tie": 0, "draw": 0, "equal": 0, "both": 0, "neither": 0}
VERDICTS |= {f"{name}_{side}": VERDICTS[side] for name in ("model", *ANSWERS) for side in "ab12"}
VERDICTS |= dict.fromkeys(("tie_(bothbad)", "tie_(both_bad)", "both_bad", "bothbad", "[[c]]"), 0)
MAX_VERDICT = 40
# Kinds of numbers.
STRENGTH, VERDICT_NUMBER = "strength", "verdict"
IN_BRACKETS = re.compile(r"\[\[([^\[\]]+)\]\]")
COMPARISON = re.compile(r"(a|b)_?(>>?|<<?|==?)_?(a|b)")


def two_answers(columns: Collection[str]) -> tuple[str, str] | None:
    """The two columns that hold the answers, if there are any."""
    return next((pair for pair in ANSWER_COLUMNS if columns >= set(pair)), None)


def _answers(samples: Samples) -> Iterable[Name]:
    return ANSWER_COLUMNS


def _verdicts(samples: Samples) -> Iterable[Name]:
    """All verdicts, since two may contradict each other; of the judges of one row, some may not have voted."""
    annotators = tuple(column for column, values in samples.items() if values and ANNOTATOR.fullmatch(column))
    verdicts = tuple(column for column in VERDICT_COLUMNS if samples.get(column))
    return [names for names in (annotators, verdicts) if names] + [*STRENGTH_COLUMNS]


def _scores(samples: Samples) -> Iterable[Name]:
    """The columns that score two answers, by their suffixes."""
    answers = two_answers(samples.keys()) or ()
    return [tuple(f"score{SUFFIX.search(answer)[0]}" for answer in answers)] * bool(answers)


ANSWER = Column("answers", _answers)
VERDICT = Column("verdict", _verdicts)
SCORES = Column("ratings", _scores, holds=may_be_number)


def winner(votes: dict[str, Any], *, from_zero: bool) -> int:
    """1 or 2, or 0 for a tie: no verdict has more votes than every other, or the tie has most.

    >>> winner({"annotator1": 2, "annotator2": 0, "annotator3": 2}, from_zero=False)
    2

    Args:
        votes: the verdicts by their columns, without nulls.
        from_zero: whether the first answer has the number 0.
    """
    counted = Counter(_vote(value, column, from_zero=from_zero) for column, value in votes.items())
    # Annotators may differ. Two columns of one verdict can't: one of them is about something else.
    if len(counted) > 1 and not all(map(ANNOTATOR.fullmatch, votes)):
        values = ", ".join(f"{column} {value!r}" for column, value in votes.items())
        raise Malformed("verdicts_differ", f"{values}: the verdicts differ; keep one of the columns")
    (first, most), *others = counted.most_common(2)
    return 0 if others and others[0][1] == most else first


def clues_of(votes: dict[str, Any]) -> set[Clue]:
    """What verdicts that are numbers show of the meaning of their column's numbers."""
    clues = set()
    for column, value in votes.items():
        text = _normalised(value)
        if column in STRENGTH_COLUMNS:
            strength = number_of(text)
            if strength is not None:
                clues.add((column, STRENGTH, "above 0" if strength > 0 else "0 or below"))
        elif text in ("0", "1", "2") and not ANNOTATOR.fullmatch(column):
            clues.add((column, VERDICT_NUMBER, text))
    return clues


def check_verdicts(clues: set[Clue]) -> None:
    """Raise Malformed if the clues of all rows of a file don't show which answer a number means."""
    for column, kind in sorted({(column, kind) for column, kind, _ in clues}):
        found = {value for name, of, value in clues if (name, of) == (column, kind)}
        if kind == VERDICT_NUMBER and found == {"0", "1"}:
            what = "0 and 1, and never 2: 0 may mean a tie, or the first answer; write A, B or tie"
            raise Malformed("ambiguous_votes", f"{column} holds {what}")
        if kind == STRENGTH and found == {"above 0"}:
            what = (
                "only numbers above 0: strengths that are all for the second answer, or a scale whose lower half is for the "
                f"first; if they are strengths, name it under `fields`, as `verdict: {column}`, else write A, B or tie"
            )
            raise Malformed("ambiguous_votes", f"{column} holds {what}")


def is_verdict(value: Any) -> bool:
    """Whether a text is only the name of one of two answers, such as `response_a`."""
    return isinstance(value, str) and len(value) < MAX_VERDICT and VERDICTS.get(_normalised(value), 0) != 0


def _vote(value: Any, column: str, *, from_zero: bool) -> int:
    text = _normalised(value)
    if from_zero and text.isdecimal():
        verdict = {"0": 1, "1": 2}.get(text)
    elif column in STRENGTH_COLUMNS:
        strength = number_of(text)
        verdict = None if strength is None else 0 if strength == 0 else 1 if strength < 0 else 2
    else:
        verdict = _verdict(text)
    if verdict is not None:
        return verdict
    actual = f"{value!r:.40}" if isinstance(value, (str, int, float)) else kind_of(value)
    expected = "a number below, above or at 0" if column in STRENGTH_COLUMNS else "1, 2, A, B, A>B, or 0 for a tie"
    raise Malformed("unknown_vote", f"{column} holds {actual}, expected {expected}")


def _normalised(value: Any) -> str:
    """A verdict in lower case without brackets, its spaces as underscores; "" for what can't be a verdict."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        return ""
    text = "_".join(str(value).lower().split())
    inside = IN_BRACKETS.fullmatch(text)
    return text if inside is None or text in VERDICTS else inside[1]


def _verdict(text: str) -> int | None:
    if text in VERDICTS:
        return VERDICTS[text]
    if (mean := number_of(text)) is not None and 1 < mean < 2:
        # The mean of several votes.
        return 1 if mean < 1.5 else 2
    compared = COMPARISON.fullmatch(text)
    if compared is None or compared[1] == compared[3]:
        return None
    first, sign, _ = compared.groups()
    if "=" in sign:
        return 0
    return VERDICTS[first] if ">" in sign else 3 - VERDICTS[first]
