"""Where sequences are supervised, asked of many places at once."""

from dataclasses import dataclass

import numpy as np

from snaketune.tokenization.token_store import TokenParts


@dataclass(frozen=True)
class Runs:
    """The supervised runs of all sequences of a split, as tokens have them: start, end, start, end, ...

    Attributes:
        values: int32, laid end to end.
        offsets: int64[n + 1], of the sequences.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, parts: TokenParts, split: str) -> "Runs":
        return cls(*parts.lists(split, "supervised_runs"))

    def inside(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, ...]:
        """What is supervised of K stretches of tokens.

        Args:
            sequence, start, stop: int[K].
        Returns:
            int64[r] each: for every run that reaches into a stretch, the stretch's number, and begin and end within it.

        >>> runs = Runs(np.array([2, 5, 7, 9]), np.array([0, 4]))
        >>> [found.tolist() for found in runs.inside(np.array([0, 0]), np.array([0, 4]), np.array([3, 8]))]
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
        """int32[K]: how many tokens of each stretch are supervised."""
        of, begin, end = self.inside(sequence, start, stop)
        return np.bincount(of, end - begin, minlength=len(sequence)).astype(np.int32)

    def first_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """int32[K]: where the first supervised token of each stretch ends; its stop if there is none."""
        of, begin, _ = self.inside(sequence, start, stop)
        found = stop.astype(np.int32)
        np.minimum.at(found, of, begin.astype(np.int32) + 1)
        return found

    def last_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """int32[K]: where the last supervised token of each stretch ends; its start if there is none."""
        of, _, end = self.inside(sequence, start, stop)
        found = start.astype(np.int32)
        np.maximum.at(found, of, end.astype(np.int32))
        return found
