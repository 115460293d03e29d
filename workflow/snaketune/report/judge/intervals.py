"""95 % confidence intervals of the difference of two shares or losses, in closed form, hence deterministic."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from snaketune.evaluation.score_intervals import Z, per_token, wilson

Interval = tuple[float, float]
# Identifies a document: the digest of its pack, and its number there.
Document = TypeVar("Document")


def wins(margin_P: np.ndarray) -> np.ndarray:
    """float[P]: 1 for a margin above zero, 0 below, and 0.5 for a tie."""
    return (1 + np.sign(margin_P)) / 2


def paired(before_N: np.ndarray, after_N: np.ndarray) -> Interval:
    """The interval of the share of correct rows after, less before, on the same rows: bool[N] each, or float[N] with halves.

    As in McNemar's test, only rows that changed are informative. Half a row is added to each kind of change (Agresti and Min,
    2005), which keeps the interval sensible if few or no rows changed.

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
    before: Mapping[Document, tuple[float, int]], after: Mapping[Document, tuple[float, int]]
) -> Interval | None:
    """The interval of the mean per token after, less before, over common documents; None for fewer than five.

    Args:
        before, after: By document, a sum and its number of tokens; None is returned if the tokens differ.

    >>> one = {n: (float(n), 2) for n in range(1, 7)}
    >>> twice = {n: (2 * total, tokens) for n, (total, tokens) in one.items()}
    >>> [round(bound, 2) for bound in paired_per_token(one, twice)], paired_per_token(one, {})
    ([0.77, 2.73], None)
    """
    both = sorted(before.keys() & after.keys())
    tokens = [after[document][1] for document in both]
    if not both or tokens != [before[document][1] for document in both]:
        return None
    mean, half = per_token([after[document][0] - before[document][0] for document in both], tokens)
    return None if half is None else (mean - half, mean + half)


def separate(before: float, before_size: int, after: float, after_size: int) -> Interval:
    """The interval of a difference of shares whose rows can't be paired: Newcombe's, from both Wilson intervals.

    >>> [round(bound, 2) for bound in separate(0.0, 20, 0.5, 20)], separate(0.5, 0, 0.5, 9)
    ([0.24, 0.7], (-1.0, 1.0))
    """
    if not before_size or not after_size:
        return -1.0, 1.0
    (low_0, high_0), (low_1, high_1) = wilson(before, before_size), wilson(after, after_size)
    low, high = math.hypot(after - low_1, high_0 - before), math.hypot(high_1 - after, before - low_0)
    return after - before - low, after - before + high
