"""Which sequence goes into which row: global best-fit-decreasing over a histogram of lengths.

Best-fit-decreasing takes the sequences from long to short and puts each into the row that it fills best; a new row is the
shortest that holds it. Sequences of one length are interchangeable, and so are rows with one amount of free space, so whole
groups move at once and the cost is that of sorting by length: some ten million sequences per second on one core, and about
40 bytes for each.

That freedom also spreads what is supervised: among rows with the same free space, the one with the fewest supervised tokens
so far gets the sequence with the most. It costs no row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Rows, each a run of `order`.

    Row r holds the sequences `order[starts[r]:starts[r + 1]]`, in this order.

    Attributes:
        order: int32[N], the sequences, row after row.
        starts: int64[R + 1].
        capacities: int32[R], tokens that each row can hold, from short to long.
    """

    order: np.ndarray
    starts: np.ndarray
    capacities: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, r: int) -> np.ndarray:
        return self.order[self.starts[r] : self.starts[r + 1]]


def plan_best_fit_decreasing(
    lengths: np.ndarray, capacities: Sequence[int], supervised: np.ndarray | None = None
) -> PackingPlan:
    """Pack sequences into rows.

    Deterministic: equal sequences keep their order. For one capacity Johnson's bound for best-fit-decreasing holds: at most
    11/9 of the best possible number of rows, plus one.

    Args:
        lengths: int[N], tokens of each sequence, each in 1..capacities[-1].
        capacities: the row lengths that there are, from short to long.
        supervised: int[N], tokens of each sequence that are supervised, to be spread over the rows.
    Raises:
        ValueError: a length outside 1..capacities[-1].

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 5, 4, 2]), capacities=[10])
    >>> [plan.row(r).tolist() for r in range(plan.rows)]
    [[1, 3], [2, 0, 4]]

    Rows of 4 are opened for what fits into them, once no begun row of 10 has room:

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
        rows.place(length, int(counts[length]))
    return rows.plan(by_length)


def lower_bound_rows(lengths: np.ndarray, capacity: int) -> int:
    """No packing needs fewer rows: all tokens must fit, and two sequences over half a row can't share one.

    >>> lower_bound_rows(np.array([6, 6, 6]), capacity=10)
    3
    """
    return int(max(-(-int(np.sum(lengths)) // capacity), np.count_nonzero(np.asarray(lengths) > capacity / 2)))


def _longest_first(lengths: np.ndarray, supervised: np.ndarray | None, capacity: int) -> np.ndarray:
    """int32[N]: from long to short, among equals roughly from many supervised tokens to few, then in order.

    One stable sort of 16-bit keys, which is a radix sort; what the length leaves of the 16 bits holds the supervised share.
    """
    if capacity >= 2**16:
        return np.argsort(capacity - lengths, kind="stable").astype(np.int32)
    keys = (capacity - lengths).astype(np.uint16)
    spare = 16 - capacity.bit_length()
    if supervised is not None and spare:
        share = supervised.astype(np.float32) / lengths.astype(np.float32)
        keys = (keys << spare) | ((1 - share) * (2**spare - 1)).astype(np.uint16)
    return np.argsort(keys, kind="stable").astype(np.int32)


class _Rows:
    """Rows while they fill. Sequences are known by their place in the order from long to short."""

    def __init__(self, capacities: Sequence[int], supervised: np.ndarray):
        self.capacities, self.supervised = capacities, supervised
        self.row_at = np.empty(len(supervised), np.int32)
        self.slot_at = np.empty(len(supervised), np.int32)
        self.taken = self.rows = 0
        # Per row: its capacity, sequences and supervised tokens so far. They grow by doubling.
        self.capacity = np.empty(1024, np.int32)
        self.count = np.zeros(1024, np.int32)
        self.load = np.zeros(1024, np.int64)
        # Rows with f tokens left, in groups; bit f of `open` is set where there are any.
        self.free: dict[int, list[np.ndarray]] = {}
        self.open = 0

    def place(self, length: int, count: int) -> None:
        """Find rows for the next `count` sequences, all of `length` tokens."""
        while count:
            space, group = self._tightest(length, count)
            # A row once begun stays the tightest fit for its length until nothing more fits in.
            each = space // length
            full, rest = divmod(min(count, each * len(group)), each)
            self._put(group[:full], each, space - each * length)
            if rest:
                self._put(group[full : full + 1], rest, space - rest * length)
            self._keep(space, group[full + bool(rest) :])
            count -= full * each + rest

    def plan(self, by_length: np.ndarray) -> PackingPlan:
        capacity = self.capacity[: self.rows]
        by_capacity = np.argsort(capacity, kind="stable")
        count = self.count[: self.rows][by_capacity]
        starts = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
        place = np.empty(self.rows, np.int64)
        place[by_capacity] = starts[:-1]
        order = np.empty(len(by_length), np.int32)
        order[place[self.row_at] + self.slot_at] = by_length
        return PackingPlan(order=order, starts=starts, capacities=capacity[by_capacity])

    def _tightest(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Rows with the least space that holds `length`, those with the fewest supervised tokens first; or new ones."""
        fitting = self.open >> length
        if not fitting:
            capacity = next(capacity for capacity in self.capacities if capacity >= length)
            return capacity, self._new(-(-count // (capacity // length)), capacity)
        # The lowest set bit is the tightest fit.
        space = length + (fitting & -fitting).bit_length() - 1
        group = self.free[space].pop()
        if not self.free[space]:
            del self.free[space]
            self.open &= ~(1 << space)
        load = self.load[group]
        if self.capacities[-1] < 2**16:
            load = load.astype(np.uint16)
        return space, group[np.argsort(load, kind="stable")]

    def _new(self, rows: int, capacity: int) -> np.ndarray:
        group = np.arange(self.rows, self.rows + rows, dtype=np.int32)
        self.rows += rows
        while self.rows > len(self.capacity):
            self.capacity, self.count, self.load = (
                np.concatenate([column, np.zeros_like(column)]) for column in (self.capacity, self.count, self.load)
            )
        self.capacity[group] = capacity
        return group

    def _put(self, group: np.ndarray, each: int, left: int) -> None:
        """`each` sequences into every row of `group`: the first round in its order, the next in reverse, and so on."""
        taken, self.taken = self.taken, self.taken + each * len(group)
        rounds = (each, len(group))
        rows, slots, supervised = (
            column[taken : self.taken].reshape(rounds) for column in (self.row_at, self.slot_at, self.supervised)
        )
        rows[::2], rows[1::2] = group, group[::-1]
        slots[:] = np.arange(each, dtype=np.int32)[:, None]
        slots += self.count[rows]
        self.count[group] += each
        self.load[group] += supervised[::2].sum(0) + supervised[1::2].sum(0)[::-1]
        self._keep(left, group)

    def _keep(self, left: int, group: np.ndarray) -> None:
        if left and len(group):
            self.free.setdefault(left, []).append(group)
            self.open |= 1 << left
