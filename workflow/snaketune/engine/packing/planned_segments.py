"""Planned segments, and the supervised tokens of any range of a sequence; `plan` makes these, and `write` reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from snaketune.engine.packing.ragged import gather
from snaketune.engine.packing.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class PlannedSegments:
    """K segments: ranges of sequences' tokens, each of which becomes one segment of a row. All arrays are int32[K].

    Attributes:
        sequence, start, stop: the number of the sequence within its split, and the range of its tokens.
        prefix, prefix_segment: how many tokens the segment attends to besides its own, at the beginning of the sequence of
            which earlier segment of its unit or row; 0 and the segment's own number if it has no prefix.
        supervised: supervised tokens in the range.
    """

    sequence: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    prefix: np.ndarray
    prefix_segment: np.ndarray
    supervised: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def tokens(self) -> np.ndarray:
        return self.stop - self.start

    def take(self, which: np.ndarray | slice) -> "PlannedSegments":
        return PlannedSegments(**{name: getattr(self, name)[which] for name in COLUMNS})

    @classmethod
    def concatenated(cls, several: Sequence["PlannedSegments"]) -> "PlannedSegments":
        return cls(**{name: np.concatenate([getattr(one, name) for one in several]) for name in COLUMNS})

    @classmethod
    def without_prefix(
        cls, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray, supervised: np.ndarray
    ) -> "PlannedSegments":
        zeros = np.zeros(len(sequence), np.int32)
        columns = (sequence, start, stop, zeros, zeros, supervised)
        return cls(**{name: np.asarray(column, np.int32) for name, column in zip(COLUMNS, columns, strict=True)})


COLUMNS = tuple(field.name for field in fields(PlannedSegments))


@dataclass(frozen=True)
class SupervisedRuns:
    """The supervised runs of all n sequences of a split as start, end, start, end, ...: int32 values and int64[n + 1] offsets;
    with the weight of each run, float32, unless all are 1.

    Ranges of tokens are given by arrays of K sequences, starts and stops.
    """

    values: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None = None

    @classmethod
    def read(cls, parts: Tokens, split: str) -> "SupervisedRuns":
        weights = parts.lists(split, "run_weights")[0] if parts.weighted(split) else None
        return cls(*parts.lists(split, "supervised_runs"), weights)

    def intersect(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, ...]:
        """int64[r] each: per intersection of a range with a run, the number of the range, its start and end, and the
        number of the run.

        >>> runs = SupervisedRuns(np.array([2, 5, 7, 9]), np.array([0, 4]))
        >>> [column.tolist() for column in runs.intersect(np.array([0, 0]), np.array([0, 4]), np.array([3, 8]))]
        [[0, 1, 1], [2, 4, 7], [3, 5, 8], [0, 0, 1]]
        """
        first, last = self.offsets[sequence] // 2, self.offsets[sequence + 1] // 2
        run, _ = gather(first, last - first)
        of = np.repeat(np.arange(len(sequence)), last - first)
        begin, end = np.maximum(self.values[2 * run], start[of]), np.minimum(self.values[2 * run + 1], stop[of])
        overlaps = begin < end
        return of[overlaps], begin[overlaps], end[overlaps], run[overlaps]

    def count(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """int32[K], the supervised tokens of each range."""
        of, begin, end, _ = self.intersect(sequence, start, stop)
        return np.bincount(of, end - begin, minlength=len(sequence)).astype(np.int32)

    def first_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """int32[K], the end of the first supervised token of each range; the range's stop if there is none."""
        of, begin, *_ = self.intersect(sequence, start, stop)
        ends = stop.astype(np.int32)
        np.minimum.at(ends, of, begin.astype(np.int32) + 1)
        return ends

    def last_end(self, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """int32[K], the end of the last supervised token of each range; the range's start if there is none."""
        of, _, end, _ = self.intersect(sequence, start, stop)
        ends = start.astype(np.int32)
        np.maximum.at(ends, of, end.astype(np.int32))
        return ends
