"""Conversations fitted to the row length: whole, or, if longer than a row, as the overflow policy says.

Each becomes one segment of a row, or several where the policy splits it. Whole conversations are handled batch by batch; only
those longer than a row cost a loop in Python.
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
class PlannedSegments:
    """K segments: ranges of sequences' tokens, each of which becomes one segment of a row. All arrays are int32[K].

    Attributes:
        sequence: the number of the sequence within its split.
        start, stop: the range of its tokens.
        prefix: how many tokens the segment attends to besides its own.
        prefix_segment: the segment whose sequence the prefix is of: the number of an earlier segment of the same unit or row;
            the segment's own number if it has no prefix.
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

    def take(self, which: np.ndarray) -> "PlannedSegments":
        return PlannedSegments(**{name: getattr(self, name)[which] for name in COLUMNS})

    @classmethod
    def concatenate(cls, parts: list["PlannedSegments"]) -> "PlannedSegments":
        """Return the segments of all `parts`, in order."""
        empty = [np.empty(0, np.int32)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts] or empty) for name in COLUMNS})

    @classmethod
    def without_prefix(
        cls, sequence: np.ndarray, start: np.ndarray, stop: np.ndarray, supervised: np.ndarray
    ) -> "PlannedSegments":
        """Return segments that attend to their own tokens only, each the only one of its unit."""
        zeros = np.zeros(len(sequence), np.int32)
        columns = (sequence, start, stop, zeros, zeros, supervised)
        return cls(**{name: column.astype(np.int32) for name, column in zip(COLUMNS, columns, strict=True)})


COLUMNS = tuple(f.name for f in fields(PlannedSegments))


@dataclass
class DropCounts:
    """Counts of what was dropped (by reason), truncated and split, in sequences and in tokens."""

    dropped_rows: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    split_rows: int = 0
    split_pieces: int = 0

    def drop(self, reason: str, rows: int, tokens: int) -> None:
        """Count dropped sequences and tokens; `rows` is 0 if only a part of a sequence is dropped."""
        if rows or tokens:
            self.dropped_rows[reason] += rows
            self.dropped_tokens[reason] += tokens


def fit_conversations(
    spec: PlanSpec, row_length: int, batches: Iterable[pa.RecordBatch], drops: DropCounts
) -> PlannedSegments:
    """Return the segments of all conversations of a split.

    Args:
        row_length: tokens of the longest rows.
        batches: record batches of the index that `tokenize` wrote.
        drops: updated with what is dropped, truncated and split.
    Raises:
        SnaketuneError: a conversation longer than a row, and `overflow` is `raise`.
    """
    parts, first = [], 0
    for batch in batches:
        parts.append(_Batch(batch, first, drops).segments(spec, row_length))
        first += len(batch)
    return PlannedSegments.concatenate(parts)


class _Batch:
    """The conversations of one record batch of the index; `first` is the number of its first sequence."""

    def __init__(self, batch: pa.RecordBatch, first: int, drops: DropCounts):
        self.ids, self.first, self.drops = batch.column("id"), first, drops
        self.length = batch.column("length").to_numpy()
        self.supervised = batch.column("supervised").to_numpy()
        self.control_text = batch.column("control_text").to_numpy(zero_copy_only=False)
        self.runs, self.turn_ends = batch.column("supervised_runs"), batch.column("turn_ends")

    def segments(self, spec: PlanSpec, row_length: int) -> PlannedSegments:
        remaining = np.ones(len(self.length), bool)
        if spec.strategy == "none":
            # TRL would encode such text as control tokens.
            self._drop(remaining, self.control_text, "control_token_in_text")
        self._drop(remaining, self.length == 0, "refused_by_template")
        self._drop(remaining, self.supervised == 0, "nothing_supervised")
        too_long = remaining & (self.length > row_length)
        if spec.strategy == "wrapped" or not too_long.any():
            return self._whole(remaining)
        if spec.overflow == "raise":
            at = int(too_long.argmax())
            raise SnaketuneError(
                f"conversation {self.ids[at]} has {self.length[at]} tokens, packing.length is {row_length}; raise the length, "
                "or set packing.overflow to drop, truncate or split"
            )
        if spec.overflow == "drop":
            self._drop(remaining, self.length > row_length, "longer_than_row")
            return self._whole(remaining)
        cut = self._truncate if spec.overflow == "truncate" else self._split
        segments = [segment for at in np.flatnonzero(too_long).tolist() for segment in cut(at, row_length)]
        columns = np.array(segments, np.int32).reshape(-1, 4).T
        both = PlannedSegments.concatenate(
            [self._whole(remaining & ~too_long), PlannedSegments.without_prefix(*columns)]
        )
        return both.take(np.argsort(both.sequence, kind="stable"))

    def _drop(self, remaining: np.ndarray, which: np.ndarray, reason: str) -> None:
        which = which & remaining
        self.drops.drop(reason, int(which.sum()), int(self.length[which].sum()))
        remaining &= ~which

    def _whole(self, which: np.ndarray) -> PlannedSegments:
        at = np.flatnonzero(which)
        return PlannedSegments.without_prefix(
            self.first + at, np.zeros(len(at), np.int32), self.length[at], self.supervised[at]
        )

    def _truncate(self, at: int, row_length: int) -> list[tuple[int, ...]]:
        """Cut a conversation after the last turn that ends within a row; if nothing before is supervised, at the row's end."""
        stop = self._turn_end(at, 0, row_length)
        if not stop or not self._supervised(at, 0, stop):
            stop = row_length
        supervised, length = self._supervised(at, 0, stop), int(self.length[at])
        if not supervised:
            self.drops.drop("nothing_supervised_in_a_row", 1, length)
            return []
        self.drops.truncated_rows += 1
        self.drops.truncated_tokens += length - stop
        return [(self.first + at, 0, stop, supervised)]

    def _split(self, at: int, row_length: int) -> list[tuple[int, ...]]:
        """Split a conversation into parts of at most a row, dropping the parts in which nothing is supervised."""
        length, start, parts = int(self.length[at]), 0, []
        while start < length:
            stop = length if length - start <= row_length else self._turn_end(at, start, start + row_length)
            stop = stop or start + row_length
            if supervised := self._supervised(at, start, stop):
                parts.append((self.first + at, start, stop, supervised))
            else:
                self.drops.drop("nothing_supervised_in_a_piece", 0, stop - start)
            start = stop
        self.drops.split_rows += bool(parts)
        self.drops.split_pieces += len(parts)
        if not parts:
            self.drops.dropped_rows["nothing_supervised_in_a_piece"] += 1
        return parts

    def _turn_end(self, at: int, start: int, stop: int) -> int:
        """Return the last end of a turn in (start, stop], of a supervised turn if there is one; 0 if no turn ends there.

        A supervised turn is preferred so that questions stay with their answers.
        """
        ends = [end for end in self.turn_ends[at].as_py() if start < end <= stop]
        answers = set(self.runs[at].as_py()[1::2])
        return ([end for end in ends if end in answers] or ends or [0])[-1]

    def _supervised(self, at: int, start: int, stop: int) -> int:
        """Return the supervised tokens in [start, stop) as a segment: its first token has no token to be predicted from."""
        runs: list[Any] = self.runs[at].as_py()
        return sum(max(0, min(b, stop) - max(a, start + 1)) for a, b in zip(runs[::2], runs[1::2]))
