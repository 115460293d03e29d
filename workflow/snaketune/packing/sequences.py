"""From a plan and tokenized parts to rows: tokens copied slice by slice, labels, segments.

The tokens of a row lie all over the parts. They are copied out of the mapped files, and once enough pages have been touched
they are given back, so that memory stays below a gigabyte whatever the size of the corpus.
"""

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.packing.conversation_overflow import COLUMNS, Pieces
from snaketune.packing.shards import IGNORED, row_batch
from snaketune.packing.supervised_runs import Runs
from snaketune.tables import read_table
from snaketune.tokenization.ragged import offsets_of
from snaketune.tokenization.token_store import TokenParts

# Files of this size may stay mapped as a whole. Of larger ones, a slice maps 64 kB around itself: half a gigabyte at most.
MAPPED_BYTES = 2**30
SLICES_BEFORE_RELEASE = 8192


class PlannedRows:
    """The plan of a split."""

    def __init__(self, plan: Artifact, split: str):
        rows = read_table(plan.file(f"{split}-rows.arrow"))
        self._starts, self._pair_starts = (offsets_of(rows[name].to_numpy()) for name in ("pieces", "pairs"))
        self._pieces = read_table(plan.file(f"{split}-pieces.arrow"))
        self._pairs = None
        if plan.manifest["kind"] != "sft":
            self._pairs = read_table(plan.file(f"{split}-pairs.arrow"))

    def pieces(self, first: int, last: int) -> tuple[Pieces, np.ndarray]:
        """The pieces of rows `first` to `last`, and where each row's begin among them."""
        start, stop = int(self._starts[first]), int(self._starts[last])
        table = self._pieces.slice(start, stop - start)
        pieces = Pieces(**{name: table[name].to_numpy() for name in COLUMNS})
        return pieces, self._starts[first : last + 1] - start

    def completions(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Of preferences, the segments that these rows' completions end with, and where each row's begin among them."""
        if self._pairs is None:
            return None
        start, stop = int(self._pair_starts[first]), int(self._pair_starts[last])
        table = self._pairs.slice(start, stop - start)
        ends = np.stack([table[name].to_numpy() for name in ("chosen", "rejected")], 1).reshape(-1)
        return ends, 2 * (self._pair_starts[first : last + 1] - start)


class Sequences:
    """The tokenized sequences of a split, and where they are to go.

    Shapes: R rows of L tokens, K pieces.
    """

    def __init__(self, plan: PlannedRows, parts: TokenParts, split: str):
        self._plan, self._parts = plan, parts
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.places()
        self._runs = Runs.of(parts, split)
        self._large = sum(values.nbytes for values in self._values) > MAPPED_BYTES
        self._touched = 0

    def batch(self, first: int, last: int, length: int, pad_id: int) -> pa.RecordBatch:
        """Rows `first` to `last` of the plan, as a shard has them."""
        pieces, starts = self._plan.pieces(first, last)
        row_of = np.repeat(np.arange(last - first), np.diff(starts))
        tokens = pieces.tokens.astype(np.int64)
        ends = np.cumsum(tokens)
        fill = np.diff(np.concatenate([[0], ends])[starts])
        # Where each piece begins in its block of rows.
        padding = np.cumsum(length - fill) - (length - fill)
        ids = self.ids(pieces, row_of, fill, length, pad_id)
        labels = self._labels(pieces, ends - tokens + padding[row_of], ids)
        tree = None
        if completions := self._plan.completions(first, last):
            tree = (pieces.prefix_segment, *completions)
        return row_batch(ids, labels, fill, starts, pieces.tokens, pieces.prefix, tree)

    def ids(self, pieces: Pieces, row_of: np.ndarray, fill: np.ndarray, length: int, pad_id: int) -> np.ndarray:
        """int32[R, L]: the tokens of the pieces, and padding after each row's last.

        Args:
            row_of: int[K], rising.
            fill: int64[R], tokens of each row.
        """
        rows = len(fill)
        begin = self._begin[pieces.sequence]
        slices = [self._batch[pieces.sequence], begin + pieces.start, begin + pieces.stop, row_of]
        # Padding is one more slice of each row.
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

    def _labels(self, pieces: Pieces, places: np.ndarray, ids_RL: np.ndarray) -> np.ndarray:
        """int32[R, L]: the tokens where loss is taken, else -100.

        Args:
            places: int64[K], where each piece begins in the block of rows.
        """
        # The first token of a segment without a prefix has nothing to be predicted from.
        of, begin, end = self._runs.inside(pieces.sequence, pieces.start + (pieces.prefix == 0), pieces.stop)
        # From edge to edge it is supervised and not supervised in turn.
        edge = (np.stack([begin, end], 1) + (places - pieces.start)[of][:, None]).reshape(-1)
        edge = np.concatenate([[0], edge, [ids_RL.size]])
        supervised = np.repeat(np.arange(len(edge) - 1) % 2 == 1, np.diff(edge))
        return np.where(supervised.reshape(ids_RL.shape), ids_RL, np.int32(IGNORED))
