"""Ratings of both completions of a pair, and its status, which must agree with which one was chosen."""

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.columns import mark_read
from snaketune.corpus.rows import Dropped, Malformed

# Beside these columns, a text about a completion is often a judge's.
JUDGE_COLUMNS = frozenset(
    ("score", "rating", "grade", "label", "verdict", "judge", "judge_model", "critique", "feedback", "kto_tag")
)
SIDE = re.compile(r"(?:^|(?<=[-_. ]))(chosen|rejected)(?=$|[-_. ])")
RATING = re.compile(r"(?:^|[-_. ])(?:rating|score|reward|grade)s?(?:$|[-_. ])")
# Ratings of something else, and ratings where lower is better.
NOT_RATINGS = re.compile(r"rank|num|count|toxic|harm|unsafe|bias|length", re.IGNORECASE)
UNRATED = -1
DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*")
STATUS, TIE = "status", "tie"


def check_ratings(raw: dict[str, Any], margin: float = 0) -> None:
    """Raise unless the ratings of a pair, if it has any, agree with what was chosen.

    >>> check_ratings({"chosen": "x", "rejected": "y", "chosen-rating": 4, "rejected-rating": 2})

    Args:
        margin: the least difference of two ratings that gives a pair.
    Raises:
        Malformed: the rejected completion is rated higher.
        Dropped: the ratings are equal or differ by less than the margin, or the row's status is a tie.
    """
    status = raw.get(STATUS)
    if isinstance(status, str) and status.strip().lower() == TIE:
        raise Dropped("tie")
    differences = []
    for better, worse in rated_columns(tuple(raw)):
        higher, lower = number_of(raw.get(better)), number_of(raw.get(worse))
        if higher is None or lower is None:
            continue
        mark_read(raw, better)
        mark_read(raw, worse)
        if not higher == lower == UNRATED:
            differences.append((higher - lower, better, worse))
    if not differences:
        return
    # One of several that agrees is enough: a better answer needn't be better in every respect.
    largest, better, worse = max(differences)
    if largest == 0:
        raise Dropped("tie")
    if 0 < largest < margin:
        raise Dropped("below_margin")
    if largest < 0:
        raise Malformed(
            "rating_contradicts",
            f"{better} is {raw[better]}, {worse} is {raw[worse]}: the rejected completion is rated higher; swap them, or "
            "remove these columns if a lower rating is better",
        )


@lru_cache(maxsize=4096)
def rated_columns(columns: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of columns that rate the chosen and the rejected completion.

    >>> rated_columns(("chosen", "rejected", "score_rejected", "score_chosen", "chosen_length"))
    (('score_chosen', 'score_rejected'),)
    """
    rated = (
        column for column in columns if "chosen" in column and RATING.search(column) and not NOT_RATINGS.search(column)
    )
    pairs = ((column, SIDE.sub("rejected", column)) for column in rated)
    return tuple((better, worse) for better, worse in pairs if worse != better and worse in columns)


def number_of(value: Any) -> float | None:
    """Return a rating as a number; None if it isn't one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and DECIMAL_COMMA.fullmatch(value):
        # Spreadsheets in many countries write decimals with a comma.
        value = value.replace(",", ".")
    try:
        number = float(value) if isinstance(value, (int, float, str, Decimal)) else None
    except (ValueError, OverflowError):
        return None
    return None if number is None or number != number else number
