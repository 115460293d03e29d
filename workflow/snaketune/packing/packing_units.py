"""Units, which are packed as one (a segment, or the tree of a prompt's completions), and the rows that they are packed into."""

from dataclasses import dataclass, replace

import numpy as np

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.planned_segments import PlannedSegments
from snaketune.tokenization.encoded_rows import gather


@dataclass(frozen=True, kw_only=True)
class Units:
    """U runs of segments, each of which goes into one row; segments are numbered within their unit.

    Attributes:
        segments, offsets: all segments, unit after unit, and int64[U + 1].
        pairs, pair_offsets: of preferences, int32[P, 3], unit after unit, and int64[U + 1]: the sequence whose id and source
            are the pair's, and the last segments of its chosen and of its rejected completion.
    """

    segments: PlannedSegments
    offsets: np.ndarray
    pairs: np.ndarray | None = None
    pair_offsets: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        return self._sums(self.segments.tokens)

    @property
    def supervised(self) -> np.ndarray:
        return self._sums(self.segments.supervised)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return int32[U], the sums over the segments of each unit."""
        if len(self.offsets) == len(values) + 1:
            return values
        return np.add.reduceat(values, self.offsets[:-1]).astype(np.int32)

    def take(self, order: np.ndarray) -> "Units":
        """Return the units numbered in `order`, in this order."""
        if len(self.offsets) == len(self.segments) + 1 and self.pairs is None:
            return replace(self, segments=self.segments.take(order), offsets=np.arange(len(order) + 1))
        at, offsets = gather(self.offsets[order], np.diff(self.offsets)[order])
        taken = replace(self, segments=self.segments.take(at), offsets=offsets)
        if self.pairs is None:
            return taken
        at, offsets = gather(self.pair_offsets[order], np.diff(self.pair_offsets)[order])
        return replace(taken, pairs=self.pairs[at], pair_offsets=offsets)


@dataclass(frozen=True, kw_only=True)
class PackedUnits(Units):
    """The contents of R rows: units whose segments are numbered within their row, of `capacities` (int32[R]) tokens."""

    capacities: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.capacities)

    @property
    def roots(self) -> np.ndarray:
        """int64: the segments without a prefix; every conversation has one, at its beginning."""
        return np.flatnonzero(self.segments.prefix == 0)

    @property
    def documents(self) -> int:
        """The number of conversations (or their parts) or pairs."""
        return len(self.roots if self.pairs is None else self.pairs)

    def by_pair(self, of_segments: np.ndarray) -> np.ndarray:
        """Return int32[P], the sums of int32[K] values of segments; a segment counts for the first pair that ends with it."""
        rows = np.repeat(self.offsets[:-1], np.diff(self.pair_offsets))
        _, first = np.unique(self.pairs[:, 1:] + rows[:, None], return_index=True)
        return np.bincount(first // 2, of_segments, minlength=len(self.pairs)).astype(np.int32)


def pack_units(units: Units, plan: PackingPlan) -> PackedUnits:
    """Put units into rows as planned, and number their segments within the rows."""
    units = units.take(plan.order)
    rows = PackedUnits(capacities=plan.capacities, segments=units.segments, offsets=units.offsets[plan.offsets])
    # From numbers within the unit to numbers within the row.
    shift = (units.offsets[:-1] - np.repeat(rows.offsets[:-1], np.diff(plan.offsets))).astype(np.int32)
    segment = units.segments.prefix_segment + np.repeat(shift, np.diff(units.offsets))
    rows = replace(rows, segments=replace(units.segments, prefix_segment=segment))
    if units.pairs is None:
        return rows
    pairs = units.pairs.copy()
    pairs[:, 1:] += np.repeat(shift, np.diff(units.pair_offsets))[:, None]
    return replace(
        rows,
        pairs=pairs,
        pair_offsets=units.pair_offsets[plan.offsets],
    )
