"""What of each conversation goes into rows: all of it, or, where it is longer than a row, what the overflow policy leaves.

A piece is a stretch of a sequence's tokens that becomes one segment of a row. Conversations give one piece, or several where
they are split; `trees` makes pieces of pairs. Pieces of whole conversations are made for a batch at a time; only those that are
longer than a row cost a loop.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.errors import SnaketuneError
from snaketune.stages.specs import PlanSpec


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """K pieces; all arrays are int32[K].

    Attributes:
        sequence: the number of the sequence within its split.
        start, stop: its tokens.
        prefix: how many tokens it sees besides its own.
        prefix_segment: whose these are: the number of a piece before it among those that stay together, as segments of a row
            are numbered; its own where it sees none.
        supervised: supervised tokens of its own.
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

    def take(self, which: np.ndarray) -> "Pieces":
        return Pieces(**{name: getattr(self, name)[which] for name in COLUMNS})

    @classmethod
    def joined(cls, parts: list["Pieces"]) -> "Pieces":
        """All of `parts`, in order."""
        empty = [np.empty(0, np.int32)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts] or empty) for name in COLUMNS})

    @classmethod
    def alone(cls, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray, supervised: np.ndarray) -> "Pieces":
        """Pieces that stay by themselves and see nothing but their own tokens."""
        none = np.zeros(len(sequence), np.int32)
        columns = (sequence, start, stop, none, none, supervised)
        return cls(**{name: column.astype(np.int32) for name, column in zip(COLUMNS, columns, strict=True)})


COLUMNS = tuple(f.name for f in fields(Pieces))


@dataclass
class Losses:
    """What didn't go into rows, by reason, in sequences and in tokens."""

    dropped_rows: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    split_rows: int = 0
    split_pieces: int = 0

    def drop(self, reason: str, rows: int, tokens: int) -> None:
        """Count what is left out; `rows` is 0 where only a part of a sequence is."""
        if rows or tokens:
            self.dropped_rows[reason] += rows
            self.dropped_tokens[reason] += tokens


def pieces_of(spec: PlanSpec, row_length: int, batches: Iterable[pa.RecordBatch], losses: Losses) -> Pieces:
    """The pieces of all conversations of a split.

    Args:
        row_length: tokens of the longest rows.
        batches: of the index that `tokenize` wrote.
        losses: counts what is left out.
    Raises:
        SnaketuneError: a conversation longer than a row where `overflow` is `raise`.
    """
    parts, first = [], 0
    for batch in batches:
        parts.append(_Batch(batch, first, losses).pieces(spec, row_length))
        first += len(batch)
    return Pieces.joined(parts)


class _Batch:
    """The conversations of one batch of the index."""

    def __init__(self, batch: pa.RecordBatch, first: int, losses: Losses):
        self.ids, self.first, self.losses = batch.column("id"), first, losses
        self.length = batch.column("length").to_numpy()
        self.supervised = batch.column("supervised").to_numpy()
        self.control_text = batch.column("control_text").to_numpy(zero_copy_only=False)
        self.runs, self.turn_ends = batch.column("supervised_runs"), batch.column("turn_ends")

    def pieces(self, spec: PlanSpec, row_length: int) -> Pieces:
        left = np.ones(len(self.length), bool)
        if spec.strategy == "none":
            # TRL would take such text for control tokens.
            self._drop(left, self.control_text, "control_token_in_text")
        self._drop(left, self.length == 0, "refused_by_template")
        self._drop(left, self.supervised == 0, "nothing_supervised")
        too_long = left & (self.length > row_length)
        if spec.strategy == "wrapped" or not too_long.any():
            return self._whole(left)
        if spec.overflow == "raise":
            at = int(too_long.argmax())
            raise SnaketuneError(
                f"conversation {self.ids[at]} has {self.length[at]} tokens, packing.length is {row_length}; raise the length, "
                "or set packing.overflow to drop, truncate or split"
            )
        if spec.overflow == "drop":
            self._drop(left, self.length > row_length, "longer_than_row")
            return self._whole(left)
        cut = self._truncated if spec.overflow == "truncate" else self._split
        made = [piece for at in np.flatnonzero(too_long).tolist() for piece in cut(at, row_length)]
        columns = np.array(made, np.int32).reshape(-1, 4).T
        both = Pieces.joined([self._whole(left & ~too_long), Pieces.alone(*columns)])
        return both.take(np.argsort(both.sequence, kind="stable"))

    def _drop(self, left: np.ndarray, which: np.ndarray, reason: str) -> None:
        which = which & left
        self.losses.drop(reason, int(which.sum()), int(self.length[which].sum()))
        left &= ~which

    def _whole(self, which: np.ndarray) -> Pieces:
        at = np.flatnonzero(which)
        return Pieces.alone(self.first + at, np.zeros(len(at), np.int32), self.length[at], self.supervised[at])

    def _truncated(self, at: int, row_length: int) -> list[tuple[int, ...]]:
        """A conversation up to the last turn that is over within a row, if something is supervised by then."""
        stop = self._turn_end(at, 0, row_length)
        if not stop or not self._supervised(at, 0, stop):
            stop = row_length
        supervised, length = self._supervised(at, 0, stop), int(self.length[at])
        if not supervised:
            self.losses.drop("nothing_supervised_in_a_row", 1, length)
            return []
        self.losses.truncated_rows += 1
        self.losses.truncated_tokens += length - stop
        return [(self.first + at, 0, stop, supervised)]

    def _split(self, at: int, row_length: int) -> list[tuple[int, ...]]:
        """A conversation in pieces of at most a row; those in which nothing is supervised are left out."""
        length, start, made = int(self.length[at]), 0, []
        while start < length:
            stop = length if length - start <= row_length else self._turn_end(at, start, start + row_length)
            stop = stop or start + row_length
            if supervised := self._supervised(at, start, stop):
                made.append((self.first + at, start, stop, supervised))
            else:
                self.losses.drop("nothing_supervised_in_a_piece", 0, stop - start)
            start = stop
        self.losses.split_rows += bool(made)
        self.losses.split_pieces += len(made)
        if not made:
            self.losses.dropped_rows["nothing_supervised_in_a_piece"] += 1
        return made

    def _turn_end(self, at: int, start: int, stop: int) -> int:
        """The last end of a turn in (start, stop], of one that is supervised if there is any; 0 if there is none.

        So a question isn't parted from its answer where that can be helped.
        """
        ends = [end for end in self.turn_ends[at].as_py() if start < end <= stop]
        answers = set(self.runs[at].as_py()[1::2])
        return ([end for end in ends if end in answers] or ends or [0])[-1]

    def _supervised(self, at: int, start: int, stop: int) -> int:
        """Supervised tokens in [start, stop), as a segment of its own: its first token has nothing to be predicted from."""
        runs: list[Any] = self.runs[at].as_py()
        return sum(max(0, min(b, stop) - max(a, start + 1)) for a, b in zip(runs[::2], runs[1::2]))
