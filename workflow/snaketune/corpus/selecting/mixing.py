"""Caps and weights: how many rows of each source are used, and how many times.

Both select rows by their hashes. So the same rows are selected whatever else is in the corpus, a higher cap keeps the rows of
a lower one, and a larger weight keeps those of a smaller one.
"""

import math

import numpy as np

from snaketune.corpus.selecting.words import mix

# Independent of the hash that caps use; else a weight would select among rows that a cap has selected already.
WEIGHT_SALT = np.uint64(0x5851F42D4C957F2D)


def over_cap(hashes: np.ndarray, max_rows: int) -> np.ndarray:
    """Return the indices of the rows over the cap: all but those with the smallest hashes.

    >>> over_cap(np.array([5, 3, 9], np.uint64), 2).tolist()
    [2]
    """
    return np.sort(np.argsort(hashes, kind="stable")[max_rows:])


def copies_by_weight(hashes: np.ndarray, weight: float) -> np.ndarray:
    """Return the copies of each row: the integer part of the weight, and one more for the share of rows in its fraction.

    >>> copies_by_weight(np.arange(1000, dtype=np.uint64), 2.5).mean().round(1)
    np.float64(2.5)
    """
    integer = math.floor(weight)
    limit = np.uint64((weight - integer) * 2**64)
    return (integer + (mix(hashes ^ WEIGHT_SALT) < limit)).astype(np.uint8)
