"""Units, which are packed as one (a segment, or the tree of a prompt's completions), and the rows that they are packed into."""

from dataclasses import dataclass, replace

import numpy as np

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.conversation_overflow import PlannedSegments
from snaketune.tokenization.ragged import gather


@dataclass(frozen=True, kw_only=True)
class Completions:
    """P pairs of completions.

    Attributes:
        sequence: int32[P], the sequence whose id and source are the pair's.
        ends: int32[P, 2], the last segment of the chosen and of the rejected completion, numbered as in
            `PlannedSegments.prefix_segment`.
    """

    sequence: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, which: np.ndarray) -> "Completions":
        return Completions(sequence=self.sequence[which], ends=self.ends[which])


@dataclass(frozen=True, kw_only=True)
class Units:
    """U runs of segments, each of which goes into one row.

    Attributes:
        segments: all segments, unit after unit.
        offsets: int64[U + 1], of the units in `segments`.
        completions: of preferences, all pairs, unit after unit.
        pair_offsets: int64[U + 1], of the units in `completions`.
    """

    segments: PlannedSegments
    offsets: np.ndarray
    completions: Completions | None = None
    pair_offsets: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        return _run_sums(self.segments.tokens, self.offsets)

    @property
    def supervised(self) -> np.ndarray:
        return _run_sums(self.segments.supervised, self.offsets)

    def take(self, order: np.ndarray) -> "Units":
        """Return the units numbered in `order`, in this order."""
        if len(self.offsets) == len(self.segments) + 1 and self.completions is None:
            return replace(self, segments=self.segments.take(order), offsets=np.arange(len(order) + 1))
        at, offsets = gather(self.offsets[order], np.diff(self.offsets)[order])
        taken = replace(self, segments=self.segments.take(at), offsets=offsets)
        if self.completions is None:
            return taken
        at, offsets = gather(self.pair_offsets[order], np.diff(self.pair_offsets)[order])
        return replace(taken, completions=self.completions.take(at), pair_offsets=offsets)


@dataclass(frozen=True, kw_only=True)
class PackedUnits:
    """The contents of R rows; segments are numbered within their row.

    Attributes:
        capacities: int32[R], tokens that each row can hold.
        segments: all segments, row after row.
        offsets: int64[R + 1], of the rows in `segments`.
        completions: all pairs, row after row; None for conversations.
        pair_offsets: int64[R + 1], of the rows in `completions`; None for conversations.
    """

    capacities: np.ndarray
    segments: PlannedSegments
    offsets: np.ndarray
    completions: Completions | None = None
    pair_offsets: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.capacities)

    @property
    def documents(self) -> int:
        """The number of segments of conversations, or of pairs."""
        return len(self.segments if self.completions is None else self.completions)

    def by_pair(self, of_segments: np.ndarray) -> np.ndarray:
        """Return int32[P], the sums of int32[K] values of segments; a segment counts for the first pair that ends with it."""
        rows = np.repeat(self.offsets[:-1], np.diff(self.pair_offsets))
        _, first = np.unique(self.completions.ends + rows[:, None], return_index=True)
        return np.bincount(first // 2, of_segments, minlength=len(self.completions)).astype(np.int32)


def single_segment_units(segments: PlannedSegments) -> Units:
    """Return one unit per segment."""
    return Units(segments=segments, offsets=np.arange(len(segments) + 1))


def pack_units(units: Units, plan: PackingPlan) -> PackedUnits:
    """Put units into rows as planned, and number their segments within the rows."""
    units = units.take(plan.order)
    rows = PackedUnits(capacities=plan.capacities, segments=units.segments, offsets=units.offsets[plan.offsets])
    if units.completions is None:
        return rows
    # From numbers within the unit to numbers within the row.
    shift = (units.offsets[:-1] - np.repeat(rows.offsets[:-1], np.diff(plan.offsets))).astype(np.int32)
    segment = units.segments.prefix_segment + np.repeat(shift, np.diff(units.offsets))
    ends = units.completions.ends + np.repeat(shift, np.diff(units.pair_offsets))[:, None]
    return replace(
        rows,
        segments=replace(units.segments, prefix_segment=segment),
        completions=replace(units.completions, ends=ends),
        pair_offsets=units.pair_offsets[plan.offsets],
    )


def _run_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return int32[U], the sums of runs of `values`, none of them empty."""
    if len(offsets) == len(values) + 1:
        return values
    return np.add.reduceat(values, offsets[:-1]).astype(np.int32)
