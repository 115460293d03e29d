"""From a plan and tokenized parts to rows: tokens copied slice by slice, labels, segments.

The tokens of a row lie all over the parts. They are copied out of the mapped files, and once enough pages have been touched
they are given back, so that memory stays below a gigabyte whatever the size of the corpus.
"""

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.packing.pieces import COLUMNS, Pieces
from snaketune.packing.shards import IGNORED, row_batch
from snaketune.tables import read_table
from snaketune.tokenization.tokens import TokenParts

# Files of this size may stay mapped as a whole. Of larger ones, a slice maps 64 kB around itself: half a gigabyte at most.
MAPPED_BYTES = 2**30
SLICES_BEFORE_RELEASE = 8192


class PlannedRows:
    """The plan of a split."""

    def __init__(self, plan: Artifact, split: str):
        rows = read_table(plan.file(f"{split}-rows.arrow"))
        self._starts = np.concatenate([[0], np.cumsum(rows["pieces"].to_numpy(), dtype=np.int64)])
        self._table = read_table(plan.file(f"{split}-pieces.arrow"))

    def pieces(self, first: int, last: int) -> tuple[Pieces, np.ndarray]:
        """The pieces of rows `first` to `last`, and where each row's begin among them."""
        start, stop = int(self._starts[first]), int(self._starts[last])
        table = self._table.slice(start, stop - start)
        pieces = Pieces(**{name: table[name].to_numpy() for name in COLUMNS})
        return pieces, self._starts[first : last + 1] - start


class Sequences:
    """The tokenized sequences of a split, and where they are to go.

    Shapes: R rows of L tokens, K pieces.
    """

    def __init__(self, plan: PlannedRows, parts: TokenParts, split: str):
        self._plan, self._parts = plan, parts
        views = parts.views(split)
        self._values = views.values
        # Per sequence: the batch that holds it, and where it begins there.
        self._batch = np.repeat(np.arange(len(views.values), dtype=np.int32), np.diff(views.first))
        self._begin = np.concatenate([np.empty(0, np.int64), *(offsets[:-1] for offsets in views.offsets)])
        self._runs, self._run_starts = parts.lists(split, "supervised_runs")
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
        return row_batch(ids, labels, fill, *_segments(pieces, starts))

    def ids(self, pieces: Pieces, row_of: np.ndarray, fill: np.ndarray, length: int, pad_id: int) -> np.ndarray:
        """int32[R, L]: the tokens of the pieces, and padding after each row's last.

        Args:
            row_of: int[K], rising.
            fill: int64[R], tokens of each row.
        """
        rows = len(fill)
        batch, begin = self._batch[pieces.sequence], self._begin[pieces.sequence]
        halves = [(batch, begin + pieces.start, begin + pieces.stop, row_of)]
        if pieces.second_stop.any():
            halves.append((batch, begin + pieces.second_start, begin + pieces.second_stop, row_of))
        # In the order of the rows: first halves and second halves in turn, and padding as one more slice of each row.
        slices = [np.stack(columns, axis=1).reshape(-1) for columns in zip(*halves, strict=True)]
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
        counts = (self._run_starts[pieces.sequence + 1] - self._run_starts[pieces.sequence]) // 2
        of = np.repeat(np.arange(len(pieces)), counts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = self._run_starts[pieces.sequence[of]] + 2 * nth
        begin, end = self._runs[at], self._runs[at + 1]
        # The first token of a segment without a prefix has nothing to be predicted from.
        lone = (pieces.start == 0) | (pieces.prefix == 0)
        halves = [(pieces.start + lone, pieces.stop, places - pieces.start)]
        if pieces.second_stop.any():
            shift = places + pieces.stop - pieces.start - pieces.second_start
            halves.append((pieces.second_start + (pieces.prefix == 0), pieces.second_stop, shift))
        edges = []
        for low, high, shift in halves:
            start, stop = np.maximum(begin, low[of]), np.minimum(end, high[of])
            edges.append((np.stack([start, stop], 1) + shift[of][:, None])[start < stop])
        # From edge to edge it is supervised and not supervised in turn.
        edge = np.concatenate([[0], np.sort(np.concatenate(edges).reshape(-1)), [ids_RL.size]])
        supervised = np.repeat(np.arange(len(edge) - 1) % 2 == 1, np.diff(edge))
        return np.where(supervised.reshape(ids_RL.shape), ids_RL, np.int32(IGNORED))


def _segments(pieces: Pieces, starts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Segments as `row_batch` takes them: where each row's begin, lengths, prefixes; of pairs also the trees that they form."""
    first = pieces.stop - pieces.start
    if not pieces.second_stop.any():
        return starts, first, np.zeros(len(pieces), np.int32)
    second = pieces.second_stop - pieces.second_start
    shared = np.where(pieces.start > 0, pieces.prefix, 0)
    prefixes = np.stack([shared, pieces.prefix], 1).reshape(-1)
    number = np.arange(2 * len(pieces)) - np.repeat(2 * starts[:-1], 2 * np.diff(starts))
    opened = np.maximum.accumulate(np.where(prefixes == 0, np.arange(2 * len(pieces)), 0))
    return starts * 2, np.stack([first, second], 1).reshape(-1), prefixes, number[opened], starts * 2, number
