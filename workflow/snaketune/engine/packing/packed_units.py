"""Units of sequences and of rows. A unit is packed as one: a segment, or the tree of a prompt's completions.

Conversations that are packed whole, nearly all of them, have no segments until the rows that hold them are read: 4 bytes each
say which they are. Others, and the trees of pairs, have 24 bytes per segment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from snaketune.engine.packing.best_fit import PackingPlan
from snaketune.engine.packing.planned_segments import PlannedSegments
from snaketune.engine.packing.ragged import gather

UNITS_PER_BATCH = 2**16


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

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> np.ndarray:
        return self._sums(self.segments.tokens)

    @property
    def supervised(self) -> np.ndarray:
        return self._sums(self.segments.supervised)

    @property
    def sequence(self) -> np.ndarray:
        """int32[U], the sequence that each unit begins with."""
        return self.segments.sequence[self.offsets[:-1]]

    @property
    def segment_tokens(self) -> np.ndarray:
        return self.segments.tokens

    @property
    def has_prefixes(self) -> bool:
        return bool(self.segments.prefix.any())

    @property
    def roots(self) -> np.ndarray:
        """int64: the segments without a prefix; every conversation has one, at its beginning."""
        return np.flatnonzero(self.segments.prefix == 0)

    @property
    def documents(self) -> int:
        """The number of conversations (or their parts) or pairs."""
        return len(self.roots if self.pairs is None else self.pairs)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """int32[U], the sums over the segments of each unit."""
        if len(self.offsets) == len(values) + 1:
            return values
        return np.add.reduceat(values, self.offsets[:-1]).astype(np.int32)

    def take(self, order: np.ndarray) -> "Units":
        """The units numbered in `order`, in this order."""
        if len(self.offsets) == len(self.segments) + 1 and self.pairs is None:
            return replace(self, segments=self.segments.take(order), offsets=np.arange(len(order) + 1))
        at, offsets = gather(self.offsets[order], np.diff(self.offsets)[order])
        units = replace(self, segments=self.segments.take(at), offsets=offsets)
        if self.pairs is None:
            return units
        at, offsets = gather(self.pair_offsets[order], np.diff(self.pair_offsets)[order])
        return replace(units, pairs=self.pairs[at], pair_offsets=offsets)


@dataclass(frozen=True, kw_only=True)
class ConversationUnits:
    """The units of all conversations of a split, in order: one for each, and further ones for those of several units.

    Attributes:
        tokens, supervised: uint16[U], or int32[U] for rows of 2**16 tokens or more. Units of 0 tokens aren't packed.
        cut, cut_at: the units that aren't whole conversations of one segment, and their numbers among all, ascending.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    cut: Units
    cut_at: np.ndarray
    pairs = None

    @classmethod
    def of(cls, tokens: np.ndarray, supervised: np.ndarray, segments: PlannedSegments) -> "ConversationUnits":
        """Args: tokens, supervised: of each conversation, 0 if it isn't whole; segments: of the others, by conversation."""
        begins = np.flatnonzero(segments.prefix == 0)
        cut = Units(segments=segments, offsets=np.append(begins, len(segments)))
        if not len(begins):
            return cls(tokens=tokens, supervised=supervised, cut=cut, cut_at=np.zeros(0, np.int32))
        is_further = np.diff(cut.sequence, prepend=-1) == 0
        at = cut.sequence + np.cumsum(is_further, dtype=np.int32)
        if is_further.any():
            tokens, supervised = (np.insert(column, cut.sequence[is_further] + 1, 0) for column in (tokens, supervised))
        tokens[at], supervised[at] = cut.tokens, cut.supervised
        return cls(tokens=tokens, supervised=supervised, cut=cut, cut_at=at)

    def __len__(self) -> int:
        """The number of units that are packed."""
        return int(np.count_nonzero(self.tokens))

    @property
    def documents(self) -> int:
        return len(self)

    @property
    def has_prefixes(self) -> bool:
        return self.cut.has_prefixes

    @cached_property
    def _further(self) -> np.ndarray:
        """int32, the units that continue the conversation of the unit before, ascending."""
        return self.cut_at[np.diff(self.cut.sequence, prepend=-1) == 0]

    @property
    def sequence(self) -> np.ndarray:
        return self.sequence_of(np.arange(len(self.tokens), dtype=np.int32))

    @property
    def segment_tokens(self) -> np.ndarray:
        whole = self.tokens.copy()
        whole[self.cut_at] = 0
        return np.concatenate([whole, self.cut.segment_tokens.astype(whole.dtype)])

    def sequence_of(self, units: np.ndarray) -> np.ndarray:
        """int32, the conversation of each of the units with these numbers."""
        if not len(self._further):
            return units.astype(np.int32)
        return (units - np.searchsorted(self._further, units, side="right")).astype(np.int32)

    def take(self, order: np.ndarray) -> Units:
        """The units numbered in `order`, in this order."""
        zeros = np.zeros(len(order), np.int32)
        segments = PlannedSegments.without_prefix(
            self.sequence_of(order), zeros, self.tokens[order], self.supervised[order]
        )
        if not len(self.cut_at):
            return Units(segments=segments, offsets=np.arange(len(order) + 1))
        at = np.minimum(np.searchsorted(self.cut_at, order), len(self.cut_at) - 1)
        is_cut = self.cut_at[at] == order
        cut = self.cut.take(at[is_cut])
        # The segments of cut units come after one for each unit.
        starts, lengths = np.arange(len(order)), np.ones(len(order), np.int64)
        starts[is_cut], lengths[is_cut] = len(order) + cut.offsets[:-1], np.diff(cut.offsets)
        which, offsets = gather(starts, lengths)
        return Units(segments=PlannedSegments.concatenated([segments, cut.segments]).take(which), offsets=offsets)


@dataclass(frozen=True, kw_only=True)
class PackedUnits(Units):
    """The contents of R rows: units whose segments are numbered within their row, of `capacities` (int32[R]) tokens."""

    capacities: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.capacities)

    def by_pair(self, of_segments: np.ndarray) -> np.ndarray:
        """int32[P], the sums of int32[K] values of segments; a segment counts for the first pair that ends with it."""
        rows = np.repeat(self.offsets[:-1], np.diff(self.pair_offsets))
        _, first = np.unique(self.pairs[:, 1:] + rows[:, None], return_index=True)
        return np.bincount(first // 2, of_segments, minlength=len(self.pairs)).astype(np.int32)


def pack_units(units: Units | ConversationUnits, plan: PackingPlan) -> PackedUnits:
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


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """All rows of a split, as `engine.packing.row_builder.RowPlan`; their segments are made when they are read."""

    units: Units | ConversationUnits
    plan: PackingPlan

    @property
    def rows(self) -> int:
        return self.plan.rows

    def sums(self, of_units: np.ndarray) -> np.ndarray:
        """The sums over the units of each row, in the type of the values."""
        if not self.rows:
            return of_units[:0]
        return np.add.reduceat(of_units[self.plan.order], self.plan.offsets[:-1], dtype=of_units.dtype)

    def packed(self, first: int, last: int) -> PackedUnits:
        """Rows `first` to `last` (excluded)."""
        return pack_units(self.units, self.plan.part(first, last))

    def segments(self, first: int, last: int) -> tuple[PlannedSegments, np.ndarray]:
        packed = self.packed(first, last)
        return packed.segments, packed.offsets

    def completions(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        packed = self.packed(first, last)
        return None if packed.pairs is None else (packed.pairs[:, 1:].reshape(-1), 2 * packed.pair_offsets)

    def batches(self) -> Iterator[tuple[int, PackedUnits]]:
        """Yield all rows in order, some UNITS_PER_BATCH units at a time, with the number of the first row of each batch."""
        first = 0
        while first < self.rows:
            end = self.plan.offsets[first] + UNITS_PER_BATCH
            last = max(int(np.searchsorted(self.plan.offsets, end, side="right")) - 1, first + 1)
            yield first, self.packed(first, last)
            first = last
