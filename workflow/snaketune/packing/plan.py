"""Which sequence goes into which row: global best-fit-decreasing over a histogram of lengths.

Best-fit-decreasing takes the sequences from long to short and puts each into the row that it fills best. Sequences of one
length are interchangeable, and so are rows with one amount of free space, so whole groups move at once and the cost is
that of sorting: some tens of millions of sequences per second, and a few bytes for each.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Rows, each a run of `order`.

    Row r holds the sequences `order[starts[r]:starts[r + 1]]`, in this order.

    Attributes:
        order: int64[N], the sequences, row after row.
        starts: int64[R + 1].
    """

    order: np.ndarray
    starts: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, r: int) -> np.ndarray:
        return self.order[self.starts[r] : self.starts[r + 1]]


def plan_best_fit_decreasing(lengths: np.ndarray, capacity: int) -> PackingPlan:
    """Pack sequences into rows of `capacity` tokens.

    Deterministic: equal lengths keep their order. Johnson's bound for best-fit-decreasing holds: at most 11/9 of the best
    possible number of rows, plus one.

    Args:
        lengths: int[N], tokens of each sequence, each in 1..capacity.
    Raises:
        ValueError: a length outside 1..capacity.

    >>> plan = plan_best_fit_decreasing(np.array([3, 6, 5, 4, 2]), capacity=10)
    >>> [plan.row(r).tolist() for r in range(plan.rows)]
    [[1, 3], [2, 0, 4]]
    """
    lengths = np.asarray(lengths)
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= capacity):
        raise ValueError(f"lengths must lie in 1..{capacity}, found {lengths.min()}..{lengths.max()}")
    by_length = np.argsort(-lengths.astype(np.int32), kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows = 0
    # free[f]: rows with f tokens left, in groups; `open_` has bit f set where there are any.
    free: dict[int, list[np.ndarray]] = {}
    open_ = 0
    taken = 0

    def put_back(left: int, group: np.ndarray) -> None:
        nonlocal open_
        if left and len(group):
            free.setdefault(left, []).append(group)
            open_ |= 1 << left

    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        while count:
            fitting = open_ >> length
            if fitting:
                # The lowest set bit is the tightest fit.
                space = length + (fitting & -fitting).bit_length() - 1
                group = free[space].pop()
                if not free[space]:
                    del free[space]
                    open_ &= ~(1 << space)
            else:
                space = capacity
                group = np.arange(rows, rows + -(-count // (capacity // length)), dtype=np.int64)
                rows += len(group)
            # A row once begun stays the tightest fit for its length until nothing more fits in.
            each = space // length
            full, rest = divmod(min(count, each * len(group)), each)
            placed = full * each + rest
            items = by_length[taken : taken + placed]
            row_of[items[: full * each]] = np.repeat(group[:full], each)
            put_back(space - each * length, group[:full])
            if rest:
                row_of[items[full * each :]] = group[full]
                put_back(space - rest * length, group[full : full + 1])
            put_back(space, group[full + bool(rest) :])
            taken += placed
            count -= placed
    # Within a row: from long to short, as placed.
    order = by_length[np.argsort(row_of[by_length], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return PackingPlan(order=order, starts=starts)


def lower_bound_rows(lengths: np.ndarray, capacity: int) -> int:
    """No packing needs fewer rows: all tokens must fit, and two sequences over half a row can't share one.

    >>> lower_bound_rows(np.array([6, 6, 6]), capacity=10)
    3
    """
    return int(max(-(-int(np.sum(lengths)) // capacity), np.count_nonzero(np.asarray(lengths) > capacity / 2)))
