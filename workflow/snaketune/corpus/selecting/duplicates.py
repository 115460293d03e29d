"""Duplicate rows, and groups of related rows.

Rows are identified by their number and compared by 64-bit hashes: among ten million rows, the probability that two
different ones share a hash is 3 in a million. Sorting takes about 40 bytes of memory per row.
"""

from array import array

import numpy as np


def first_occurrence(hashes: np.ndarray) -> np.ndarray:
    """Return, for each row, the first row with the same hash; the row's own number if it is the first.

    >>> first_occurrence(np.array([7, 5, 7, 7], np.uint64)).tolist()
    [0, 1, 0, 0]
    """
    order = np.argsort(hashes, kind="stable").astype(np.uint32)
    ordered = hashes[order]
    first = np.empty(len(hashes), np.uint32)
    # In sorted order, a run of equal hashes starts with the first row that has it.
    first[order] = order[np.searchsorted(ordered, ordered)]
    return first


def not_first(group: np.ndarray) -> np.ndarray:
    """Return True for rows that aren't the first of their group: the ones to drop if it is a group of duplicates.

    >>> not_first(np.array([0, 1, 0, 1])).tolist()
    [False, False, True, True]
    """
    return group != np.arange(len(group))


class Groups:
    """Disjoint groups of rows (union-find), each identified by its first row."""

    def __init__(self, first: np.ndarray):
        """Args: first: for each row, the first row of its initial group."""
        self.parent = array("I")
        self.parent.frombytes(first.astype(np.uint32).tobytes())

    def join(self, a: int, b: int) -> None:
        a, b = self._root(a), self._root(b)
        self.parent[max(a, b)] = min(a, b)

    def not_joined(self, pairs: np.ndarray) -> np.ndarray:
        """Return the pairs of rows with different parents; some of them may be in one group all the same."""
        parent = np.frombuffer(self.parent, np.uint32)
        return pairs[parent[pairs[:, 0]] != parent[pairs[:, 1]]]

    def first(self) -> np.ndarray:
        parent = np.frombuffer(self.parent, np.uint32).copy()
        while True:
            further = parent[parent]
            if np.array_equal(further, parent):
                return parent
            parent = further

    def _root(self, row: int) -> int:
        parent = self.parent
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row
