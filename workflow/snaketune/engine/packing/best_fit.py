"""Packing of units into rows, best fit decreasing. A unit is packed as one: a segment, or the tree of a prompt's completions.

Best-fit-decreasing takes the sequences from long to short and puts each into the row that it fills best; a new row has the
shortest capacity that holds the sequence. Sequences of one length are interchangeable, and so are rows with equal free space,
so over a histogram of lengths whole groups are packed per step: some ten million sequences per second on one core, and 40 bytes
of memory per sequence.

The same freedom balances the supervised tokens: among rows with equal free space, the row with the fewest supervised tokens so
far gets the sequence with the most. This never costs a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from snaketune.engine.packing.planned_segments import PlannedSegments
from snaketune.engine.packing.ragged import gather, offsets_of

# Rows of sequences that are packed together if their order counts: more rows are fuller, fewer are closer to the order.
ROWS_PER_GROUP = 64


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """R rows of N sequences: row r holds the sequences `order[offsets[r]:offsets[r + 1]]`, in this order.

    Attributes:
        order, offsets: int32[N] and int64[R + 1].
        capacities: int32[R], tokens that each row can hold, ascending.
    """

    order: np.ndarray
    offsets: np.ndarray
    capacities: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    def row(self, r: int) -> np.ndarray:
        return self.order[self.offsets[r] : self.offsets[r + 1]]


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
        """int32[P], the sums of int32[K] values of segments; a segment counts for the first pair that ends with it."""
        rows = np.repeat(self.offsets[:-1], np.diff(self.pair_offsets))
        _, first = np.unique(self.pairs[:, 1:] + rows[:, None], return_index=True)
        return np.bincount(first // 2, of_segments, minlength=len(self.pairs)).astype(np.int32)


def plan_best_fit_decreasing(
    lengths: np.ndarray, capacities: Sequence[int], supervised: np.ndarray | None = None
) -> PackingPlan:
    """Pack sequences into rows; sequences that are equal in length and supervision stay in order.

    For one capacity Johnson's bound for best-fit-decreasing holds: at most 11/9 of the optimal number of rows, plus one.

    Args:
        lengths: int[N], tokens of each sequence, each in 1..capacities[-1].
        capacities: the configured row lengths, ascending.
        supervised: int[N], supervised tokens of each sequence, to be balanced over the rows.
    Raises:
        ValueError: a length outside 1..capacities[-1].

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 5, 4, 2]), capacities=[10])
    >>> [plan.row(r).tolist() for r in range(plan.rows)]
    [[1, 3], [2, 0, 4]]

    A row of 5 is opened for a sequence that fits into it once no open row of 10 has enough free space:

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 9, 4, 2]), capacities=[5, 10])
    >>> [(plan.row(r).tolist(), int(plan.capacities[r])) for r in range(plan.rows)]
    [([0, 4], 5), ([2], 10), ([1, 3], 10)]
    """
    lengths, capacity = np.asarray(lengths), capacities[-1]
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= capacity):
        raise ValueError(f"lengths must lie in 1..{capacity}, found {lengths.min()}..{lengths.max()}")
    by_length = _longest_first(lengths, supervised, capacity)
    supervised = np.zeros(len(lengths), np.int32) if supervised is None else np.asarray(supervised, np.int32)[by_length]
    rows = _Rows(capacities, supervised)
    counts = np.bincount(lengths, minlength=capacity + 1)
    for length in np.flatnonzero(counts)[::-1].tolist():
        rows.pack(length, int(counts[length]))
    return rows.plan(by_length)


def plan_in_order(
    lengths: np.ndarray, capacity: int, supervised: np.ndarray, keys: np.ndarray, rows: int = ROWS_PER_GROUP
) -> PackingPlan:
    """Pack sequences by ascending `keys`, int or float[N]: group after group, each of as many tokens as `rows` rows hold and
    packed by `plan_best_fit_decreasing`. Of each group the last row may be nearly empty.

    >>> plan = plan_in_order(np.array([4, 6, 5, 5]), 10, np.zeros(4), keys=np.array([1, 2, 1, 1]), rows=1)
    >>> [plan.row(r).tolist() for r in range(plan.rows)]
    [[2, 3], [0], [1]]
    """
    ascending = np.argsort(keys, kind="stable")
    begins = np.cumsum(lengths[ascending], dtype=np.int64) - lengths[ascending]
    groups = np.split(ascending, np.flatnonzero(np.diff(begins // (rows * capacity))) + 1)
    plans = [plan_best_fit_decreasing(lengths[group], [capacity], supervised[group]) for group in groups]
    return PackingPlan(
        order=np.concatenate([group[plan.order] for group, plan in zip(groups, plans)]).astype(np.int32),
        offsets=offsets_of(np.concatenate([np.diff(plan.offsets) for plan in plans])),
        capacities=np.concatenate([plan.capacities for plan in plans]),
    )


def lower_bound_rows(lengths: np.ndarray, capacity: int) -> int:
    """A lower bound on the rows of any packing: all tokens must fit, and two sequences over half a row can't share one.

    >>> lower_bound_rows(np.array([6, 6, 6]), capacity=10)
    3
    """
    return int(max(-(-int(np.sum(lengths)) // capacity), np.count_nonzero(np.asarray(lengths) > capacity / 2)))


def _longest_first(lengths: np.ndarray, supervised: np.ndarray | None, capacity: int) -> np.ndarray:
    """int32[N], the sequences from long to short, among equal lengths roughly by supervised tokens (descending).

    One stable sort of 16-bit keys, which is a radix sort; the bits that the length doesn't need hold the supervised share.
    """
    keys, spare = capacity - lengths, 16 - capacity.bit_length()
    if spare >= 0:
        keys = keys.astype(np.uint16)
    if supervised is not None and spare > 0:
        share = supervised.astype(np.float32) / lengths.astype(np.float32)
        keys = (keys << spare) | ((1 - share) * (2**spare - 1)).astype(np.uint16)
    return np.argsort(keys, kind="stable").astype(np.int32)


class _Rows:
    """Rows while they fill. Sequences are numbered by their index in the order from long to short."""

    def __init__(self, capacities: Sequence[int], supervised: np.ndarray):
        self.capacities, self.supervised = capacities, supervised
        # Per sequence: its row, and its index within that row.
        self.row_of, self.slot_of = np.empty((2, len(supervised)), np.int32)
        self.packed = self.rows = 0
        # Per row: its capacity, sequences and supervised tokens so far. The arrays grow by doubling.
        self.capacity, self.count = np.zeros((2, 1024), np.int32)
        self.supervised_in = np.zeros(1024, np.int64)
        # Groups of rows by their free space; bit f of `open` is set if there are rows with f free tokens.
        self.by_space: dict[int, list[np.ndarray]] = {}
        self.open = 0

    def pack(self, length: int, count: int) -> None:
        """Pack the next `count` sequences, all of `length` tokens."""
        while count:
            space, group = self._tightest(length, count)
            # Once a row got one of these sequences, it is the tightest fit for the next ones until it is full.
            each = space // length
            full, rest = divmod(min(count, each * len(group)), each)
            self._fill(group[:full], each, space - each * length)
            if rest:
                self._fill(group[full : full + 1], rest, space - rest * length)
            self._reopen(space, group[full + bool(rest) :])
            count -= full * each + rest

    def plan(self, by_length: np.ndarray) -> PackingPlan:
        capacity = self.capacity[: self.rows]
        by_capacity = np.argsort(capacity, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(self.count[: self.rows][by_capacity], dtype=np.int64)])
        start_of = np.empty(self.rows, np.int64)
        start_of[by_capacity] = offsets[:-1]
        order = np.empty(len(by_length), np.int32)
        order[start_of[self.row_of] + self.slot_of] = by_length
        return PackingPlan(order=order, offsets=offsets, capacities=capacity[by_capacity])

    def _tightest(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """The least sufficient free space, and the rows that have it by supervised tokens (ascending), or new rows."""
        fitting = self.open >> length
        if not fitting:
            capacity = next(capacity for capacity in self.capacities if capacity >= length)
            return capacity, self._new(-(-count // (capacity // length)), capacity)
        # The lowest set bit is the tightest fit.
        space = length + (fitting & -fitting).bit_length() - 1
        group = self.by_space[space].pop()
        if not self.by_space[space]:
            del self.by_space[space]
            self.open &= ~(1 << space)
        supervised_in = self.supervised_in[group]
        if self.capacities[-1] < 2**16:
            supervised_in = supervised_in.astype(np.uint16)
        return space, group[np.argsort(supervised_in, kind="stable")]

    def _new(self, rows: int, capacity: int) -> np.ndarray:
        group = np.arange(self.rows, self.rows + rows, dtype=np.int32)
        self.rows += rows
        while self.rows > len(self.capacity):
            columns = self.capacity, self.count, self.supervised_in
            self.capacity, self.count, self.supervised_in = (np.pad(column, (0, len(column))) for column in columns)
        self.capacity[group] = capacity
        return group

    def _fill(self, group: np.ndarray, each: int, space: int) -> None:
        """Put `each` sequences into every row of `group`, in rounds of alternating direction; `space` stays free per row."""
        packed, self.packed = self.packed, self.packed + each * len(group)
        rows, slots, supervised = (
            column[packed : self.packed].reshape(each, len(group))
            for column in (self.row_of, self.slot_of, self.supervised)
        )
        rows[::2], rows[1::2] = group, group[::-1]
        slots[:] = np.arange(each, dtype=np.int32)[:, None]
        slots += self.count[rows]
        self.count[group] += each
        self.supervised_in[group] += supervised[::2].sum(0) + supervised[1::2].sum(0)[::-1]
        self._reopen(space, group)

    def _reopen(self, space: int, group: np.ndarray) -> None:
        if space and len(group):
            self.by_space.setdefault(space, []).append(group)
            self.open |= 1 << space


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
