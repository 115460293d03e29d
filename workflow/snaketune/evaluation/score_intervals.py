"""95% intervals: how far a figure could be off because it was measured on so few prompts, pairs or documents.

They tell of the choice of the rows alone: two models on the same rows can differ by less and still differ.
"""

import math
from collections.abc import Sequence

# Standard errors on both sides of a mean that hold 95% of a normal distribution.
Z = 1.96
# Of fewer values, how much they differ isn't known well enough for any interval of their mean.
MIN_VALUES = 5
# Metrics of lm-evaluation-harness that are shares, by the beginning of their names.
SHARES = ("acc", "exact_match", "f1")


def wilson(share: float, size: int, z: float = Z) -> tuple[float, float]:
    """The 95 % interval of a share, which stays sensible for few prompts and for none or all right.

    >>> [round(bound, 3) for bound in wilson(0.0, 10)], wilson(0.5, 0)
    ([0.0, 0.278], (0.5, 0.5))
    """
    if not size:
        return share, share
    middle = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return max(0.0, middle - half), min(1.0, middle + half)


def share_interval(share: float | None, size: int) -> list[float] | None:
    """Wilson's, rounded as scores are; None where nothing was measured.

    >>> share_interval(0.5, 40), share_interval(None, 0)
    ([0.352, 0.648], None)
    """
    return None if share is None or not size else _rounded(wilson(share, size))


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """Of a mean, from the standard error of these values, by Student's t; None of fewer than five.

    >>> mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]), mean_interval([1.0, 2.0, 3.0, 4.0])
    ([1.0417, 4.9583], None)
    """
    size = len(values)
    if size < MIN_VALUES:
        return None
    mean = math.fsum(values) / size
    variance = math.fsum((value - mean) ** 2 for value in values) / (size - 1)
    return t_interval(mean, math.sqrt(variance / size), size)


def per_token_interval(sums: Sequence[float], tokens: Sequence[int]) -> list[float] | None:
    """Of a mean over tokens, which lie in documents: those of one document aren't so many separate findings. None of fewer
    than five documents.

    Args:
        sums, tokens: of each document.

    >>> per_token_interval([2.0, 4.0, 6.0, 9.0, 9.0], [2, 2, 3, 4, 5]), per_token_interval([1.0], [1])
    ([1.4148, 2.3352], None)
    """
    mean, half = per_token(sums, tokens)
    return None if half is None else _rounded((mean - half, mean + half))


def per_token(sums: Sequence[float], tokens: Sequence[int]) -> tuple[float, float | None]:
    """The mean over all tokens, and half of its interval: of a ratio of sums over documents (Cochran, Sampling Techniques,
    chapter 6), by Student's t."""
    size, whole = len(sums), math.fsum(tokens)
    mean = math.fsum(sums) / whole
    if size < MIN_VALUES:
        return mean, None
    squares = math.fsum((own - mean * count) ** 2 for own, count in zip(sums, tokens, strict=True))
    return mean, student(size - 1) * math.sqrt(squares * size / (size - 1)) / whole


def student(freedom: int) -> float:
    """Student's t that holds 95% in the middle, by its expansion around the normal distribution's (Abramowitz and Stegun,
    26.7.5); 0.3% too little at four degrees of freedom.

    >>> [round(student(freedom), 2) for freedom in (4, 10, 30, 1000)]
    [2.77, 2.23, 2.04, 1.96]
    """
    return (
        Z
        + (Z**3 + Z) / (4 * freedom)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    )


def t_interval(value: float, stderr: float, size: int, share: bool = False) -> list[float] | None:
    """Of a mean of `size` values whose standard error is known, by Student's t; None of fewer than five.

    Args:
        share: whether nothing below 0 or above 1 can be meant.

    >>> t_interval(0.9, 0.1, 50), t_interval(0.9, 0.1, 50, share=True), t_interval(0.9, 0.1, 4)
    ([0.699, 1.101], [0.699, 1.0], None)
    """
    if size < MIN_VALUES:
        return None
    half = student(size - 1) * stderr
    low, high = value - half, value + half
    return _rounded((max(0.0, low), min(1.0, high)) if share else (low, high))


def _rounded(bounds: tuple[float, float]) -> list[float]:
    return [round(bound, 4) for bound in bounds]
