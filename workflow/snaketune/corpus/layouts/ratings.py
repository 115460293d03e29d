"""What a pair's row says of its two completions besides which was chosen: ratings of both, and a status."""

import re
from functools import lru_cache
from typing import Any

from snaketune.corpus.rows import Dropped, Malformed

SIDE = re.compile(r"(?:^|(?<=[-_. ]))(chosen|rejected)(?=$|[-_. ])")
RATING = re.compile(r"(?:^|[-_. ])(?:rating|score|reward|grade)s?(?:$|[-_. ])")
STATUS, TIE = "status", "tie"


def check_ratings(raw: dict[str, Any], margin: float = 0) -> None:
    """Raise unless the ratings of a pair, where it has any, agree with what was chosen.

    >>> check_ratings({"chosen": "x", "rejected": "y", "chosen-rating": 4, "rejected-rating": 2})

    Args:
        margin: the least difference of two ratings that makes a pair.
    Raises:
        Malformed: the rejected one is rated higher.
        Dropped: both are rated alike, they differ by less than the margin, or the row's status says that it is a tie.
    """
    status = raw.get(STATUS)
    if isinstance(status, str) and status.strip().lower() == TIE:
        raise Dropped("tie")
    for better, worse in rated_columns(tuple(raw)):
        higher, lower = number_of(raw[better]), number_of(raw[worse])
        if higher is None or lower is None:
            continue
        if higher == lower:
            raise Dropped("tie")
        if 0 < higher - lower < margin:
            raise Dropped("below_margin")
        if higher < lower:
            raise Malformed(
                "rating_contradicts",
                f"{better} is {raw[better]}, {worse} is {raw[worse]}: the rejected completion is rated higher; swap them, or "
                "leave the columns out if a lower rating is better",
            )


@lru_cache(maxsize=4096)
def rated_columns(columns: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The columns that rate the chosen and the rejected completion alike.

    >>> rated_columns(("chosen", "rejected", "score_rejected", "score_chosen", "chosen_length"))
    (('score_chosen', 'score_rejected'),)
    """
    pairs = (
        (column, SIDE.sub("rejected", column)) for column in columns if "chosen" in column and RATING.search(column)
    )
    return tuple((better, worse) for better, worse in pairs if worse != better and worse in columns)


def number_of(value: Any) -> float | None:
    """A rating as a number; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None
    return None if number is None or number != number else number
