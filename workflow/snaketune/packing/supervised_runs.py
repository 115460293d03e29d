"""The supervised runs of sequences, looked up for many token ranges at a time."""

from dataclasses import dataclass

import numpy as np

from snaketune.tokenization.token_store import TokenParts


@dataclass(frozen=True)
class SupervisedRuns:
    """The supervised runs of all n sequences of a split, as the token index stores them: start, end, start, end, ...

    Attributes:
        values: int32, of all sequences, concatenated.
        offsets: int64[n + 1], of the sequences in `values`.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def read(cls, parts: TokenParts, split: str) -> "SupervisedRuns":
        return cls(*parts.lists(split, "supervised_runs"))

    def intersect(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, ...]:
        """Intersect K token ranges with the runs.

        Args:
            sequence, start, stop: int[K], the ranges.
        Returns:
            int64[r] each: per intersection, the number of its range, and its start and end in the sequence.

        >>> runs = SupervisedRuns(np.array([2, 5, 7, 9]), np.array([0, 4]))
        >>> [column.tolist() for column in runs.intersect(np.array([0, 0]), np.array([0, 4]), np.array([3, 8]))]
        [[0, 1, 1], [2, 4, 7], [3, 5, 8]]
        """
        counts = (self.offsets[sequence + 1] - self.offsets[sequence]) // 2
        of = np.repeat(np.arange(len(sequence)), counts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = self.offsets[sequence][of] + 2 * nth
        begin, end = np.maximum(self.values[at], start[of]), np.minimum(self.values[at + 1], stop[of])
        some = begin < end
        return of[some], begin[some], end[some]

    def count(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return int32[K], the supervised tokens of each range."""
        of, begin, end = self.intersect(sequence, start, stop)
        return np.bincount(of, end - begin, minlength=len(sequence)).astype(np.int32)

    def first_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return int32[K], the end of the first supervised token of each range; the range's stop if there is none."""
        of, begin, _ = self.intersect(sequence, start, stop)
        ends = stop.astype(np.int32)
        np.minimum.at(ends, of, begin.astype(np.int32) + 1)
        return ends

    def last_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return int32[K], the end of the last supervised token of each range; the range's start if there is none."""
        of, _, end = self.intersect(sequence, start, stop)
        ends = start.astype(np.int32)
        np.maximum.at(ends, of, end.astype(np.int32))
        return ends
