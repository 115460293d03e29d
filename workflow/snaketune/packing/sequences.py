"""Rows built from a plan and tokenized parts: token ids copied slice by slice, labels, segments.

The tokens of a row are spread over the parts. They are copied out of the mapped files, and the mapped pages are released after
every SLICES_BEFORE_RELEASE slices, so that memory stays below a gigabyte whatever the size of the corpus.
"""

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.packing.conversation_overflow import COLUMNS, PlannedSegments
from snaketune.packing.shards import IGNORED, row_batch
from snaketune.packing.supervised_runs import SupervisedRuns
from snaketune.tables import read_table
from snaketune.tokenization.ragged import offsets_of
from snaketune.tokenization.token_store import TokenParts

# Files of up to this size may stay in memory as a whole. Of larger ones a slice maps some 64 kB: half a gigabyte at most.
MAPPED_BYTES = 2**30
SLICES_BEFORE_RELEASE = 8192


class PlannedRows:
    """The plan of a split, as the `plan` stage wrote it."""

    def __init__(self, plan: Artifact, split: str):
        rows = read_table(plan.file(f"{split}-rows.arrow"))
        self._offsets, self._pair_offsets = (offsets_of(rows[name].to_numpy()) for name in ("pieces", "pairs"))
        self._segments = read_table(plan.file(f"{split}-pieces.arrow"))
        self._pairs = None
        if plan.manifest["kind"] != "sft":
            self._pairs = read_table(plan.file(f"{split}-pairs.arrow"))

    def segments(self, first: int, last: int) -> tuple[PlannedSegments, np.ndarray]:
        """Return the segments of rows `first` to `last` (excluded), and the offsets of these rows in them."""
        start, stop = int(self._offsets[first]), int(self._offsets[last])
        table = self._segments.slice(start, stop - start)
        segments = PlannedSegments(**{name: table[name].to_numpy() for name in COLUMNS})
        return segments, self._offsets[first : last + 1] - start

    def completions(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the segments that the rows' completions end with, and the offsets of the rows; None for conversations."""
        if self._pairs is None:
            return None
        start, stop = int(self._pair_offsets[first]), int(self._pair_offsets[last])
        table = self._pairs.slice(start, stop - start)
        ends = np.stack([table[name].to_numpy() for name in ("chosen", "rejected")], 1).reshape(-1)
        return ends, 2 * (self._pair_offsets[first : last + 1] - start)


class RowBuilder:
    """Builds the planned rows of a split from its tokenized sequences.

    Shapes: R rows of L tokens, K segments.
    """

    def __init__(self, plan: PlannedRows, parts: TokenParts, split: str):
        self._plan, self._parts = plan, parts
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.locations()
        self._runs = SupervisedRuns.read(parts, split)
        self._large = sum(values.nbytes for values in self._values) > MAPPED_BYTES
        self._touched = 0

    def batch(self, first: int, last: int, length: int, pad_id: int) -> pa.RecordBatch:
        """Return rows `first` to `last` (excluded) of the plan with the columns of a shard."""
        segments, offsets = self._plan.segments(first, last)
        row_of = np.repeat(np.arange(last - first), np.diff(offsets))
        tokens = segments.tokens.astype(np.int64)
        ends = np.cumsum(tokens)
        fill = np.diff(np.concatenate([[0], ends])[offsets])
        # The padding before each row in the block of rows.
        padding = np.cumsum(length - fill) - (length - fill)
        ids = self.ids(segments, row_of, fill, length, pad_id)
        labels = self._labels(segments, ends - tokens + padding[row_of], ids)
        tree = None
        if completions := self._plan.completions(first, last):
            tree = (segments.prefix_segment, *completions)
        return row_batch(ids, labels, fill, offsets, segments.tokens, segments.prefix, tree)

    def ids(
        self, segments: PlannedSegments, row_of: np.ndarray, fill: np.ndarray, length: int, pad_id: int
    ) -> np.ndarray:
        """Return int32[R, L], the tokens of the segments, and padding at the end of each row.

        Args:
            row_of: int[K], the row of each segment, ascending.
            fill: int64[R], tokens of each row without padding.
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

    def _labels(self, segments: PlannedSegments, positions: np.ndarray, ids_RL: np.ndarray) -> np.ndarray:
        """Return int32[R, L], the token id where loss is taken, else -100.

        Args:
            positions: int64[K], the start of each segment in the block of rows.
        """
        # The first token of a segment without a prefix has no token to be predicted from.
        of, begin, end = self._runs.intersect(segments.sequence, segments.start + (segments.prefix == 0), segments.stop)
        # The stretches between edges are unsupervised and supervised in turn.
        edge = (np.stack([begin, end], 1) + (positions - segments.start)[of][:, None]).reshape(-1)
        edge = np.concatenate([[0], edge, [ids_RL.size]])
        supervised = np.repeat(np.arange(len(edge) - 1) % 2 == 1, np.diff(edge))
        return np.where(supervised.reshape(ids_RL.shape), ids_RL, np.int32(IGNORED))
