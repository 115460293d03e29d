"""Packed shards, manifest v3.0: Arrow IPC files of fixed-length rows, memory-mapped, so that a row is a view.

    input_ids        fixed_size_list<int32>[L]
    labels           fixed_size_list<int32>[L]   the token itself where loss is taken, else -100 (not shifted)
    attention_mask   fixed_size_list<int8>[L]    1 = token, 0 = padding
    segment_lengths  list<int32>                 the documents in this row, in order
    prefix_lengths   list<int32>                 for each segment, the leading tokens it also sees (0 = none)

`documents.arrow` beside the shards tells which conversation or pair is where: split, row, id, tokens, supervised tokens, in
the order of the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.tables import read_table, write_table
from snaketune.errors import SnaketuneError

FORMAT_VERSION = "3.0"
RAW_FORMAT_VERSION = "2.0"
IGNORED = -100
SPLITS = ("train", "held_out")
ROWS_PER_SHARD = 16384


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One conversation or pair, ready to be put into a row.

    Attributes:
        ids: int32[n], tokens of all its segments laid end to end.
        supervised: bool[n], where loss is taken.
        segment_lengths, prefix_lengths: its segments.
    """

    id: str
    ids: np.ndarray
    supervised: np.ndarray
    segment_lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]


def schema(row_length: int) -> pa.Schema:
    """The columns of a shard of rows of `row_length` tokens."""
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32(), row_length)),
            ("labels", pa.list_(pa.int32(), row_length)),
            ("attention_mask", pa.list_(pa.int8(), row_length)),
            ("segment_lengths", pa.list_(pa.int32())),
            ("prefix_lengths", pa.list_(pa.int32())),
        ]
    )


def write_rows(path: Path, rows: list[list[Sequence]], row_length: int, pad_id: int) -> None:
    """Write one shard. Each row is a list of sequences that together have at most `row_length` tokens."""
    ids_RL = np.full((len(rows), row_length), pad_id, dtype=np.int32)
    labels_RL = np.full((len(rows), row_length), IGNORED, dtype=np.int32)
    real_RL = np.zeros((len(rows), row_length), dtype=np.int8)
    for r, row in enumerate(rows):
        at = 0
        for sequence in row:
            end = at + len(sequence.ids)
            ids_RL[r, at:end] = sequence.ids
            labels_RL[r, at:end] = np.where(sequence.supervised, sequence.ids, IGNORED)
            real_RL[r, at:end] = 1
            at = end
    columns = [
        pa.FixedSizeListArray.from_arrays(block.reshape(-1), row_length) for block in (ids_RL, labels_RL, real_RL)
    ]
    for name in ("segment_lengths", "prefix_lengths"):
        columns.append(
            pa.array([[n for s in row for n in getattr(s, name)] for row in rows], type=pa.list_(pa.int32()))
        )
    write_table(path, pa.Table.from_arrays(columns, schema=schema(row_length)))


class PackedRows:
    """Read access to the rows of one split of a pack artifact, with no copy of the tokens.

    Indexing gives a dict with numpy views into the mapped files: input_ids and labels [L], segment_lengths and
    prefix_lengths [s].
    """

    def __init__(self, pack: Artifact, split: str):
        """Raises SnaketuneError if the artifact isn't of format 3.0, or a shard is damaged."""
        if pack.manifest.get("format_version") != FORMAT_VERSION:
            raise SnaketuneError(
                f"{pack.manifest_path}: format_version {pack.manifest.get('format_version')!r}, expected {FORMAT_VERSION!r}"
            )
        self.row_length: int = pack.manifest["row_length"]
        batches = [batch for path in pack.files(f"{split}-") for batch in read_table(path).to_batches() if len(batch)]
        self.batches = [self._views(batch) for batch in batches]
        self.starts = np.concatenate([[0], np.cumsum([len(batch) for batch in batches])]).astype(np.int64)

    def _views(self, batch: pa.RecordBatch) -> dict[str, Any]:
        views: dict[str, Any] = {
            name: batch.column(name).flatten().to_numpy(zero_copy_only=True).reshape(-1, self.row_length)
            for name in ("input_ids", "labels")
        }
        for name in ("segment_lengths", "prefix_lengths"):
            column = batch.column(name)
            views[name] = (column.offsets.to_numpy(), column.values.to_numpy())
        return views

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        at = row - int(self.starts[number])
        views = self.batches[number]
        found = {name: views[name][at] for name in ("input_ids", "labels")}
        for name in ("segment_lengths", "prefix_lengths"):
            offsets, values = views[name]
            found[name] = values[offsets[at] : offsets[at + 1]]
        return found

    @cached_property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(
            int(values[offsets[0] : offsets[-1]].sum())
            for offsets, values in (b["segment_lengths"] for b in self.batches)
        )


def documents(pack: Artifact, split: str) -> Iterator[dict[str, Any]]:
    """Where each conversation or pair of a split is: id, row, tokens, supervised, in the order of the rows."""
    table = read_table(pack.file("documents.arrow"))
    return (row for row in table.to_pylist() if row["split"] == split)
