"""Rows built from a plan and tokenized sequences, batch by batch."""

from typing import Protocol

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.planned_segments import PlannedSegments, SupervisedRuns
from snaketune.engine.packing.ragged import alternating
from snaketune.engine.packing.shards import IGNORED, row_batch
from snaketune.engine.packing.tokens import Tokens

# Files of up to this size may stay in memory as a whole. Of larger ones a slice maps some 64 kB: half a gigabyte at most.
MAPPED_BYTES = 2**30
SLICES_BEFORE_RELEASE = 8192


class RowPlan(Protocol):
    """The plan of a split, of which rows `first` to `last` (excluded) are read."""

    def segments(self, first: int, last: int) -> tuple[PlannedSegments, np.ndarray]:
        """The segments of these rows, and the offsets of the rows in them."""
        ...

    def completions(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The segments that the rows' completions end with, and the offsets of the rows; None for conversations."""
        ...


class RowBuilder:
    """Builds the planned rows of a split from its tokenized sequences. Shapes: R rows of L tokens, K segments."""

    def __init__(self, plan: RowPlan, parts: Tokens, split: str):
        self._plan, self._parts = plan, parts
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.locations()
        self._runs = SupervisedRuns.read(parts, split)
        self._large = sum(values.nbytes for values in self._values) > MAPPED_BYTES
        self._touched = 0

    def batch(self, first: int, last: int, length: int, pad_id: int, trees: bool) -> pa.RecordBatch:
        """Rows `first` to `last` (excluded) of the plan with the columns of a shard, with or without those of trees."""
        segments, offsets = self._plan.segments(first, last)
        row_of = np.repeat(np.arange(last - first), np.diff(offsets))
        tokens = segments.tokens.astype(np.int64)
        ends = np.cumsum(tokens)
        fill = np.diff(np.concatenate([[0], ends])[offsets])
        # The padding before each row in the block of rows.
        padding = np.cumsum(length - fill) - (length - fill)
        ids = self.ids(segments, row_of, fill, length, pad_id)
        labels, weights = self._labels(segments, ends - tokens + padding[row_of], ids)
        parents = segments.prefix_segment if trees else None
        completions = self._plan.completions(first, last)
        return row_batch(ids, labels, fill, offsets, segments.tokens, segments.prefix, parents, completions, weights)

    def ids(
        self, segments: PlannedSegments, row_of: np.ndarray, fill: np.ndarray, length: int, pad_id: int
    ) -> np.ndarray:
        """int32[R, L], the tokens of the segments and padding at the end of each row, given each segment's row (int[K],
        ascending), and the tokens of each row without padding (int64[R]).
        """
        rows = len(fill)
        begin = self._begin[segments.sequence]
        slices = [self._batch[segments.sequence], begin + segments.start, begin + segments.stop, row_of]
        # The padding of each row is one more slice.
        pads = [np.full(rows, len(self._values)), np.zeros(rows, np.int64), length - fill, np.arange(rows)]
        *columns, row = (np.concatenate(both) for both in zip(slices, pads, strict=True))
        order = np.argsort(row, kind="stable")
        blocks = [*self._values, np.full(length, pad_id, np.int32)]
        out = np.empty(rows * length, np.int32)
        np.concatenate([blocks[b][s:e] for b, s, e in zip(*(column[order].tolist() for column in columns))], out=out)
        self._touched += len(order)
        if self._large and self._touched > SLICES_BEFORE_RELEASE:
            self._parts.release()
            self._touched = 0
        return out.reshape(rows, length)

    def _labels(
        self, segments: PlannedSegments, positions: np.ndarray, ids_RL: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """int32[R, L], the token id where loss is taken, else -100; and float32[R, L], its weight, if there are weights.
        Segments start at `positions` in the rows."""
        # The first token of a segment without a prefix has no token to be predicted from.
        of, begin, end, run = self._runs.intersect(
            segments.sequence, segments.start + (segments.prefix == 0), segments.stop
        )
        edges = (np.stack([begin, end], 1) + (positions - segments.start)[of][:, None]).reshape(-1)
        labels = np.where(alternating(edges, ids_RL.size).reshape(ids_RL.shape), ids_RL, np.int32(IGNORED))
        if self._runs.weights is None:
            return labels, None
        return labels, alternating(edges, ids_RL.size, self._runs.weights[run]).reshape(ids_RL.shape)
