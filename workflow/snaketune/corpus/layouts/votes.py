"""Two answers with the verdict of one or several judges, as a preference pair.

response1, response2, annotator1 … annotator3     0 for a tie, 1, 2          the answer with most votes is chosen
response_a, response_b, winner                    model_a, model_b, tie
response_A, response_B, label                     A>B, A>>B, B>A, A=B, [[A]], [[B]], [[C]] for a tie
output_1, output_2, preference                    1, 2, or 1.5 for a tie
response_0, response_1, better_response_id        0, 1
response_1, response_2, preference_strength       below 0 for the first, above for the second, 0 for a tie
answer_0, answer_1, score_0, score_1              the higher score; also human_ref_A, human_ref_B
"""

import re
from collections import Counter
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.values import Raw, kind_of, number_of
from snaketune.corpus.rows import Dropped, Malformed

ANSWERS = ("response", "output", "answer", "completion", "conversation", "assistant", "human_ref")
SUFFIX_PAIRS = (("_a", "_b"), ("_A", "_B"), ("A", "B"), ("_1", "_2"), ("1", "2"), ("_0", "_1"))
ANSWER_COLUMNS = tuple((f"{name}{first}", f"{name}{second}") for name in ANSWERS for first, second in SUFFIX_PAIRS)
VERDICT_COLUMNS = ("preference", "winner", "label", "choice", "verdict", "better_response_id")
# Signed: below zero the first answer is better, above zero the second.
STRENGTH_COLUMNS = ("preference_strength", "overall_preference")
SUFFIX = re.compile(r"_?[abAB012]$")
ANNOTATOR = re.compile(r"annotator_?\d+")
VERDICTS = {"1": 1, "2": 2, "a": 1, "b": 2, "0": 0, "1.5": 0, "tie": 0, "draw": 0, "equal": 0, "both": 0, "neither": 0}
VERDICTS |= {f"{name}_{side}": VERDICTS[side] for name in ("model", *ANSWERS) for side in "ab12"}
VERDICTS |= dict.fromkeys(("tie_(bothbad)", "tie_(both_bad)", "both_bad", "bothbad", "[[c]]"), 0)
MAX_VERDICT = 40
IN_BRACKETS = re.compile(r"\[\[([^\[\]]+)\]\]")
COMPARISON = re.compile(r"(a|b)_?(>>?|<<?|==?)_?(a|b)")


@lru_cache(maxsize=4096)
def answer_columns(columns: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the two columns that hold the answers if there is also a verdict, else None."""
    answers = two_answers(columns)
    return answers if answers and (_has_verdict(columns) or _score_columns(columns)) else None


@lru_cache(maxsize=4096)
def only_scored(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of scores if nothing else says which of two answers is better."""
    return () if _has_verdict(columns) else _score_columns(columns)


def _has_verdict(columns: tuple[str, ...]) -> bool:
    judgements = (*VERDICT_COLUMNS, *STRENGTH_COLUMNS)
    return any(column in judgements or ANNOTATOR.fullmatch(column) for column in columns)


@lru_cache(maxsize=4096)
def _score_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that score two answers, by their suffixes: `score_0`, `score_1`."""
    scores = tuple(f"score{SUFFIX.search(answer)[0]}" for answer in two_answers(columns) or ())
    return scores if set(scores) <= set(columns) else ()


@lru_cache(maxsize=4096)
def two_answers(columns: tuple[str, ...]) -> tuple[str, str] | None:
    names = set(columns)
    return next((pair for pair in ANSWER_COLUMNS if names.issuperset(pair)), None)


def winner(raw: Raw) -> int:
    """Return 1 or 2, or 0 for a tie: no verdict has more votes than every other, or the tie has most.

    >>> winner({"annotator1": 2, "annotator2": 0, "annotator3": 2}), winner({"winner": "model_a"})
    (2, 1)
    """
    columns = [column for column in raw if ANNOTATOR.fullmatch(column)]
    columns = columns or [column for column in VERDICT_COLUMNS if column in raw]
    columns = columns or [column for column in STRENGTH_COLUMNS if column in raw][:1]
    if not columns:
        scores = _scores(raw)
        if not scores:
            raise Malformed("missing_column", f"no vote: none of {', '.join(VERDICT_COLUMNS)}, annotator1, …")
        return 0 if scores[0] == scores[1] else 1 if scores[0] > scores[1] else 2
    from_zero = _counts_from_zero(two_answers(tuple(raw)))
    votes = Counter(_vote(raw[column], column, from_zero=from_zero) for column in columns)
    # Annotators may differ. Two columns of one verdict can't: one of them is about something else.
    if len(votes) > 1 and not ANNOTATOR.fullmatch(columns[0]):
        values = ", ".join(f"{column} {raw[column]!r}" for column in columns)
        raise Malformed("verdicts_differ", f"{values}: the verdicts differ; keep one of the columns")
    (first, most), *others = votes.most_common(2)
    best = 0 if others and others[0][1] == most else first
    if best and (scores := _scores(raw)) and (scores[0] - scores[1]) * (2 * best - 3) > 0:
        raise Malformed("rating_contradicts", f"the scores, {scores[0]:g} and {scores[1]:g}, contradict {columns[0]}")
    return best


def check_margin(raw: Raw, margin: float) -> None:
    """Raise Dropped if two answers have scores that differ by less than `margin`."""
    scores = _scores(raw)
    if scores and 0 < abs(scores[0] - scores[1]) < margin:
        raise Dropped("below_margin")


def _scores(raw: Raw) -> list[float | None] | None:
    scores = [number_of(raw[column]) for column in _score_columns(tuple(raw))]
    return None if None in scores else scores or None


def _counts_from_zero(answers: tuple[str, str] | None) -> bool:
    return answers is not None and answers[0].endswith("0")


def numeric_verdicts(raw: Raw) -> set[tuple[str, int]]:
    """Return the verdicts of a row that are numbers, each with its column, where their meaning is ambiguous."""
    answers = two_answers(tuple(raw))
    if answers is None or _counts_from_zero(answers) or any(ANNOTATOR.fullmatch(column) for column in raw):
        return set()
    normalised = ((column, _normalised(raw.get(column))) for column in VERDICT_COLUMNS)
    return {(column, int(text)) for column, text in normalised if text in ("0", "1", "2")}


def check_numeric_verdicts(numbers: set[tuple[str, int]]) -> None:
    """Raise Malformed if the `numeric_verdicts` of all rows of a file don't show which answer a number means."""
    for column in {column for column, _ in numbers}:
        if {number for name, number in numbers if name == column} == {0, 1}:
            what = "0 and 1, and never 2: 0 may mean a tie, or the first answer; write A, B or tie"
            raise Malformed("ambiguous_votes", f"{column} holds {what}")


def is_verdict(value: Any) -> bool:
    """Return True if a text is only the name of one of two answers, such as `response_a`."""
    return isinstance(value, str) and len(value) <= MAX_VERDICT and VERDICTS.get(_normalised(value), 0) != 0


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
    """Return a verdict in lower case without brackets, its spaces as underscores; "" for what can't be a verdict."""
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
