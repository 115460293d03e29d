"""What is placed as one: a piece, or the tree of a prompt's completions; and all of it, row after row."""

from dataclasses import dataclass, replace

import numpy as np

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.conversation_overflow import Pieces
from snaketune.tokenization.ragged import gather


@dataclass(frozen=True, kw_only=True)
class Completions:
    """P pairs of completions.

    Attributes:
        sequence: int32[P], the number of the sequence that each pair is known by.
        ends: int32[P, 2], the piece that its completions end with, the chosen one first, as `Pieces.prefix_segment` numbers
            them.
    """

    sequence: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, which: np.ndarray) -> "Completions":
        return Completions(sequence=self.sequence[which], ends=self.ends[which])


@dataclass(frozen=True, kw_only=True)
class Units:
    """U runs of pieces that stay together.

    Attributes:
        pieces: all pieces, unit after unit.
        starts: int64[U + 1], where each unit's pieces begin.
        completions: of preferences, all pairs, unit after unit.
        pair_starts: int64[U + 1], where each unit's pairs begin.
    """

    pieces: Pieces
    starts: np.ndarray
    completions: Completions | None = None
    pair_starts: np.ndarray | None = None

    @property
    def tokens(self) -> np.ndarray:
        return _sums(self.pieces.tokens, self.starts)

    @property
    def supervised(self) -> np.ndarray:
        return _sums(self.pieces.supervised, self.starts)

    def take(self, order: np.ndarray) -> "Units":
        """Some of them, in this order."""
        if len(self.starts) == len(self.pieces) + 1 and self.completions is None:
            return replace(self, pieces=self.pieces.take(order), starts=np.arange(len(order) + 1))
        at, starts = gather(self.starts[order], np.diff(self.starts)[order])
        taken = replace(self, pieces=self.pieces.take(at), starts=starts)
        if self.completions is None:
            return taken
        at, starts = gather(self.pair_starts[order], np.diff(self.pair_starts)[order])
        return replace(taken, completions=self.completions.take(at), pair_starts=starts)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """R rows: what is in each, pieces and pairs numbered through all rows, and segments within their row.

    Attributes:
        capacities: int32[R], tokens that each row can hold.
        pieces, starts: in the order of the rows, and int64[R + 1], where each row's begin.
        completions, pair_starts: the same of pairs; None for conversations.
    """

    capacities: np.ndarray
    pieces: Pieces
    starts: np.ndarray
    completions: Completions | None = None
    pair_starts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.capacities)

    @property
    def documents(self) -> int:
        """Pieces of conversations, or pairs."""
        return len(self.pieces if self.completions is None else self.completions)

    def by_pair(self, of_pieces: np.ndarray) -> np.ndarray:
        """int32[P]: sums of int32[K] of pieces, each counted with the first pair that ends with it."""
        rows = np.repeat(self.starts[:-1], np.diff(self.pair_starts))
        _, first = np.unique(self.completions.ends + rows[:, None], return_index=True)
        return np.bincount(first // 2, of_pieces, minlength=len(self.completions)).astype(np.int32)


def singles(pieces: Pieces) -> Units:
    """Every piece by itself."""
    return Units(pieces=pieces, starts=np.arange(len(pieces) + 1))


def placed(units: Units, plan: PackingPlan) -> Placed:
    """Units in the rows that a plan of units puts them in."""
    units = units.take(plan.order)
    rows = Placed(capacities=plan.capacities, pieces=units.pieces, starts=units.starts[plan.starts])
    if units.completions is None:
        return rows
    # Numbered within the unit before, within the row now.
    shift = (units.starts[:-1] - np.repeat(rows.starts[:-1], np.diff(plan.starts))).astype(np.int32)
    segment = units.pieces.prefix_segment + np.repeat(shift, np.diff(units.starts))
    ends = units.completions.ends + np.repeat(shift, np.diff(units.pair_starts))[:, None]
    return replace(
        rows,
        pieces=replace(units.pieces, prefix_segment=segment),
        completions=replace(units.completions, ends=ends),
        pair_starts=units.pair_starts[plan.starts],
    )


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """int32[U]: the sums of runs of `values`, none of them empty."""
    if len(starts) == len(values) + 1:
        return values
    return np.add.reduceat(values, starts[:-1]).astype(np.int32)
