"""Packing of sequences into rows, best fit decreasing.

Best-fit-decreasing takes the sequences from long to short and puts each into the row that it fills best; a new row has the
shortest capacity that holds the sequence. Sequences of one length are interchangeable, and so are rows with equal free space,
so over a histogram of lengths whole groups are packed per step: some ten million sequences per second on one core. Which of
them go where is then found block by block. Memory: 8 bytes per sequence besides its length and supervised tokens, and some 20
per row; if rows are of 2**16 tokens or more, 12 and 30.

The same freedom balances the supervised tokens: among rows with equal free space, the row with the fewest supervised tokens so
far gets the sequence with the most. This never costs a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from snaketune.engine.packing.ragged import offsets_of

# Rows of sequences that are packed together if their order counts: more rows are fuller, fewer are closer to the order.
ROWS_PER_GROUP = 64
# Sequences that are sorted at once.
BLOCK = 2**18


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

    def part(self, first: int, last: int) -> "PackingPlan":
        """Rows `first` to `last` (excluded)."""
        offsets = self.offsets[first : last + 1]
        order = self.order[offsets[0] : offsets[-1]]
        return PackingPlan(order=order, offsets=offsets - offsets[0], capacities=self.capacities[first:last])


def plan_best_fit_decreasing(
    lengths: np.ndarray, capacities: Sequence[int], supervised: np.ndarray | None = None, block: int = BLOCK
) -> PackingPlan:
    """Pack sequences into rows; those equal in length and supervision stay in order, and those of 0 tokens are left out.

    For one capacity Johnson's bound for best-fit-decreasing holds: at most 11/9 of the optimal number of rows, plus one.

    Args:
        lengths: int[N], tokens of each sequence, each in 0..capacities[-1].
        capacities: the configured row lengths, ascending.
        supervised: int[N], supervised tokens of each sequence, to be balanced over the rows.
        block: how many sequences are sorted at once; the result doesn't depend on it.
    Raises:
        ValueError: a length outside 0..capacities[-1].

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 5, 4, 2]), capacities=[10])
    >>> [plan.row(r).tolist() for r in range(plan.rows)]
    [[1, 3], [2, 0, 4]]

    A row of 5 is opened for a sequence that fits into it once no open row of 10 has enough free space:

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 9, 4, 2]), capacities=[5, 10])
    >>> [(plan.row(r).tolist(), int(plan.capacities[r])) for r in range(plan.rows)]
    [([0, 4], 5), ([2], 10), ([1, 3], 10)]
    """
    lengths, capacity = np.asarray(lengths), capacities[-1]
    if len(lengths) and not (lengths.min() >= 0 and lengths.max() <= capacity):
        raise ValueError(f"lengths must lie in 0..{capacity}, found {lengths.min()}..{lengths.max()}")
    counts = sum(
        (np.bincount(lengths[some], minlength=capacity + 1) for some in _blocks(len(lengths), block)),
        np.zeros(capacity + 1, np.int64),
    )
    packed = len(lengths) - int(counts[0])
    by_rank = np.zeros(len(lengths), small_int(capacity))
    if supervised is not None:
        for numbers, ranks in _longest_first(lengths, supervised, capacity, block):
            by_rank[ranks] = supervised[numbers]
    rows = _Rows(capacities, by_rank[:packed])
    for length in np.flatnonzero(counts[1:])[::-1].tolist():
        rows.pack(length + 1, int(counts[length + 1]))
    del by_rank
    places, offsets, capacities_R = rows.places()
    del rows
    order = np.empty(packed, np.int32)
    for numbers, ranks in _longest_first(lengths, supervised, capacity, block):
        end = np.searchsorted(ranks, packed)
        order[places[ranks[:end]]] = numbers[:end]
    return PackingPlan(order=order, offsets=offsets, capacities=capacities_R)


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
    ascending = ascending[lengths[ascending] > 0]
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


def small_int(row_length: int) -> type[np.uint16] | type[np.int32]:
    """The type of a number of tokens in a row."""
    return np.uint16 if row_length < 2**16 else np.int32


def _blocks(sequences: int, block: int = BLOCK) -> Iterator[slice]:
    return (slice(start, start + block) for start in range(0, sequences, block))


def _longest_first(
    lengths: np.ndarray, supervised: np.ndarray | None, capacity: int, block: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers of the sequences of each block, and their ranks among all sequences (int64, ascending), from long to
    short and among equal lengths roughly by supervised tokens (descending).

    A stable sort of 16-bit keys, which is a radix sort; the bits that the length doesn't need hold the supervised share.
    """
    spare = 16 - capacity.bit_length()
    shift = max(spare, 0) if supervised is not None else 0

    def keys_of(some: slice) -> np.ndarray:
        keys = capacity - lengths[some]
        if spare >= 0:
            keys = keys.astype(np.uint16)
        if shift:
            share = supervised[some].astype(np.float32) / np.maximum(lengths[some], 1).astype(np.float32)
            keys = (keys << shift) | ((1 - share) * (2**shift - 1)).astype(np.uint16)
        return keys

    if len(lengths) <= block:
        yield np.argsort(keys_of(slice(None)), kind="stable"), np.arange(len(lengths))
        return
    size = (capacity + 1) << shift
    # The rank of the next sequence with each key.
    next_rank = np.zeros(size, np.int64)
    for some in _blocks(len(lengths), block):
        next_rank += np.bincount(keys_of(some), minlength=size)
    next_rank = np.cumsum(next_rank) - next_rank
    for some in _blocks(len(lengths), block):
        keys = keys_of(some)
        counts, order = np.bincount(keys, minlength=size), np.argsort(keys, kind="stable")
        before = np.cumsum(counts) - counts
        yield order + some.start, (next_rank - before)[keys[order]] + np.arange(len(order))
        next_rank += counts


class _Rows:
    """Rows while they fill. Sequences are numbered by their index in the order from long to short."""

    def __init__(self, capacities: Sequence[int], supervised: np.ndarray):
        """Args: supervised: `small_int` of each sequence."""
        self.capacities, self.supervised = capacities, supervised
        # Per sequence: its row, and its index within that row.
        self.row_of, self.slot_of = np.empty(len(supervised), np.int32), np.empty_like(supervised)
        self.packed = self.rows = 0
        # Per row: its capacity, sequences and supervised tokens so far.
        self.capacity, self.count, self.supervised_in = np.zeros((3, 1024), supervised.dtype)
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

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The index of each sequence among those of all rows, int32; and the offsets and capacities of a `PackingPlan`. Nothing
        can be packed afterwards.
        """
        del self.supervised, self.supervised_in, self.by_space
        capacity = self.capacity[: self.rows]
        by_capacity = np.argsort(capacity, kind="stable") if len(self.capacities) > 1 else slice(self.rows)
        offsets = offsets_of(self.count[by_capacity])
        start_of = np.empty(self.rows, np.int32)
        start_of[by_capacity] = offsets[:-1]
        for some in _blocks(len(self.row_of)):
            self.row_of[some] = start_of[self.row_of[some]] + self.slot_of[some]
        return self.row_of, offsets, capacity[by_capacity].astype(np.int32)

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
        return space, group[np.argsort(self.supervised_in[group], kind="stable")]

    def _new(self, rows: int, capacity: int) -> np.ndarray:
        group = np.arange(self.rows, self.rows + rows, dtype=np.int32)
        self.rows += rows
        if (more := self.rows - len(self.capacity)) > 0:
            more = max(more, len(self.capacity) // 4)
            columns = self.capacity, self.count, self.supervised_in
            self.capacity, self.count, self.supervised_in = (np.pad(column, (0, more)) for column in columns)
        self.capacity[group] = capacity
        return group

    def _fill(self, group: np.ndarray, each: int, space: int) -> None:
        """Put `each` sequences into every row of `group`, in rounds of alternating direction; `space` stays free per row."""
        packed, self.packed = self.packed, self.packed + each * len(group)
        rows, slots, supervised = (
            column[packed : self.packed].reshape(each, len(group))
            for column in (self.row_of, self.slot_of, self.supervised)
        )
        count, kind = self.count[group], self.count.dtype
        rows[::2], rows[1::2] = group, group[::-1]
        slots[::2], slots[1::2] = count, count[::-1]
        slots += np.arange(each, dtype=kind)[:, None]
        self.count[group] = count + kind.type(each)
        self.supervised_in[group] += supervised[::2].sum(0, kind) + supervised[1::2].sum(0, kind)[::-1]
        self._reopen(space, group)

    def _reopen(self, space: int, group: np.ndarray) -> None:
        if space and len(group):
            self.by_space.setdefault(space, []).append(group)
            self.open |= 1 << space
