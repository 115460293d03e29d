"""95% confidence intervals of scores that are measured on a limited number of prompts, pairs or documents.

They cover the choice of the rows alone: two models can differ significantly on the same rows although their intervals overlap.
"""

import math
from collections.abc import Sequence

# 97.5% quantile of the normal distribution.
Z = 1.96
# Below this number of values, their variance isn't known well enough for an interval of the mean.
MIN_VALUES = 5
# Prefixes of the names of lm-evaluation-harness' metrics that are shares.
SHARES = ("acc", "exact_match", "f1")


def wilson(share: float, size: int) -> tuple[float, float]:
    """Wilson's interval of a share, which is also valid for few values and for shares of 0 or 1.

    >>> [round(bound, 3) for bound in wilson(0.0, 10)], wilson(0.5, 0)
    ([0.0, 0.278], (0.5, 0.5))
    """
    if not size:
        return share, share
    middle = (share + Z * Z / (2 * size)) / (1 + Z * Z / size)
    half = Z / (1 + Z * Z / size) * math.sqrt(share * (1 - share) / size + Z * Z / (4 * size * size))
    return max(0.0, middle - half), min(1.0, middle + half)


def share_interval(share: float | None, size: int) -> list[float] | None:
    """Wilson's interval, rounded as scores are; None without values.

    >>> share_interval(0.5, 40), share_interval(None, 0)
    ([0.352, 0.648], None)
    """
    return None if share is None or not size else _rounded(wilson(share, size))


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """The interval of the mean of `values` by Student's t; None for fewer than five values.

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
    """The interval of a mean over tokens from each document's sum and tokens; None for fewer than five documents.

    Tokens of one document aren't independent, so the variance is taken over documents.

    >>> per_token_interval([2.0, 4.0, 6.0, 9.0, 9.0], [2, 2, 3, 4, 5]), per_token_interval([1.0], [1])
    ([1.4148, 2.3352], None)
    """
    mean, half = per_token(sums, tokens)
    return None if half is None else _rounded((mean - half, mean + half))


def per_token(sums: Sequence[float], tokens: Sequence[int]) -> tuple[float, float | None]:
    """The mean over all tokens, a ratio of sums over documents (Cochran, Sampling Techniques, chapter 6), and half
    the width of its interval by Student's t (None for fewer than five documents)."""
    size, total_tokens = len(sums), math.fsum(tokens)
    mean = math.fsum(sums) / total_tokens
    if size < MIN_VALUES:
        return mean, None
    squares = math.fsum((value - mean * count) ** 2 for value, count in zip(sums, tokens, strict=True))
    return mean, student(size - 1) * math.sqrt(squares * size / (size - 1)) / total_tokens


def student(freedom: int, z: float = Z) -> float:
    """A quantile of Student's t, by its expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).

    At four degrees of freedom, that of 97.5% is 0.3% too small.

    Args:
        z: the normal quantile.

    >>> [round(student(freedom), 2) for freedom in (4, 10, 30, 1000)]
    [2.77, 2.23, 2.04, 1.96]
    """
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def t_interval(value: float, stderr: float, size: int, share: bool = False) -> list[float] | None:
    """The interval of a mean of `size` values with a known standard error, by Student's t; None for fewer than five.

    That of a share is limited to [0, 1].

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
