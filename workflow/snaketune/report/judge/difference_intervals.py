"""95 % intervals of the difference of two shares or losses: closed forms, so the same numbers give the same interval."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from snaketune.evaluation.score_intervals import Z, per_token, wilson

Interval = tuple[float, float]
# Of a document: its rows, and its number in them.
Place = TypeVar("Place")


def wins(margin_P: np.ndarray) -> np.ndarray:
    """float[P]: 1 of a margin above zero, 0 below, and 0.5 of a pair that neither completion wins.

    >>> wins(np.array([0.5, 0.0, -2.0])).tolist()
    [1.0, 0.5, 0.0]
    """
    return (1 + np.sign(margin_P)) / 2


def paired(before_N: np.ndarray, after_N: np.ndarray) -> Interval:
    """Of the share of the same rows that are right after, less the share before: bool[N] each, or float[N] with halves.

    Only rows that changed tell the two apart, as in McNemar's test; half a row more of each kind (Agresti and Min, 2005) keeps
    the interval sensible where few changed, or none.

    >>> was, now = np.array([False] * 8 + [True] * 2), np.array([True] * 6 + [False] * 2 + [True] * 2)
    >>> [round(bound, 2) for bound in paired(was, now)], [round(bound, 2) for bound in paired(was, was)]
    ([0.17, 0.83], [-0.16, 0.16])
    """
    moved_N = after_N.astype(float) - before_N.astype(float)
    rows, total, squares = len(moved_N) + 2, float(moved_N.sum()), float((moved_N**2).sum()) + 1
    middle = total / rows
    half = Z * math.sqrt(max(squares - total**2 / rows, 0.0)) / rows
    return max(-1.0, middle - half), min(1.0, middle + half)


def paired_per_token(
    before: Mapping[Place, tuple[float, int]], after: Mapping[Place, tuple[float, int]]
) -> Interval | None:
    """Of the mean per token after, less the one before, over the documents that both have; None of fewer than five.

    Args:
        before, after: by document, a sum and the tokens that it is over, which are the same of both.

    >>> one = {n: (float(n), 2) for n in range(1, 7)}
    >>> twice = {n: (2 * total, tokens) for n, (total, tokens) in one.items()}
    >>> [round(bound, 2) for bound in paired_per_token(one, twice)], paired_per_token(one, {})
    ([0.77, 2.73], None)
    """
    both = sorted(before.keys() & after.keys())
    if any(before[place][1] != after[place][1] for place in both):
        return None
    moved = [after[place][0] - before[place][0] for place in both]
    if not moved:
        return None
    mean, half = per_token(moved, [after[place][1] for place in both])
    return None if half is None else (mean - half, mean + half)


def separate(before: float, before_size: int, after: float, after_size: int) -> Interval:
    """Of a difference of shares whose rows can't be paired: Newcombe's, from the intervals of both.

    >>> [round(bound, 2) for bound in separate(0.0, 20, 0.5, 20)], separate(0.5, 0, 0.5, 9)
    ([0.24, 0.7], (-1.0, 1.0))
    """
    if not before_size or not after_size:
        return -1.0, 1.0
    difference = after - before
    (low_0, high_0), (low_1, high_1) = wilson(before, before_size), wilson(after, after_size)
    return (
        difference - math.hypot(after - low_1, high_0 - before),
        difference + math.hypot(high_1 - after, before - low_0),
    )
