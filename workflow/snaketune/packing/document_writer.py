"""Writing of `documents.arrow`: the conversations or pairs of a split, in the order of its rows.

Their ids and sources come from the index of tokens, where they are in the order of the sequences. They can be larger than
memory, and reading each by itself is slow. So the documents of large splits are divided twice, by temporary files:

    sequences/<n>   the documents whose sequences are in range n, in the order of the rows; this range of the index is read
                    at once, and what it says of them is added
    documents/<n>   the documents in range n of all, by range of sequences

A range and what is made of it takes some 100 bytes per document in memory, and the files 60 on disk.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.engine.packing.packed_units import PackedUnits
from snaketune.engine.packing.shards import COPIED
from snaketune.tables import BatchWriter
from snaketune.tokenization.token_store import TokenParts

ROWS_PER_BATCH = 2**16
# There are at most so many ranges, of at least so many sequences and documents each.
RANGES, LEAST_RANGE = 32, 2**20


class DocumentWriter:
    """Writes the documents of a split, given the contents of its rows; `finish` needs no plan in memory any more."""

    def __init__(
        self,
        folder: Path,
        writer: pa.RecordBatchFileWriter,
        schema: pa.Schema,
        split: str,
        parts: TokenParts,
        most: int,
        least_range: int = LEAST_RANGE,
    ):
        """Args: folder: for temporary files; most: the number of sequences or documents, whichever is higher."""
        self._parts, self._split, self._schema = parts, split, schema
        self._batches, self._documents = BatchWriter(writer, schema, ROWS_PER_BATCH), 0
        self._each = max(-(-most // RANGES), least_range)
        self._by_sequence, self._by_document = (
            _Ranges(folder / name, self._each, most) for name in ("sequences", "documents")
        )

    def add(self, first: int, rows: PackedUnits) -> None:
        """Add the documents of some rows, of which the first has this number."""
        tokens, supervised = rows.segments.tokens, rows.segments.supervised
        if rows.pairs is not None:
            sequence, offsets = rows.pairs[:, 0], rows.pair_offsets
            tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
        else:
            roots = rows.roots
            sequence, offsets = rows.segments.sequence[roots], np.searchsorted(roots, rows.offsets)
            tokens, supervised = (np.add.reduceat(column, roots, dtype=np.int32) for column in (tokens, supervised))
        row = np.repeat(np.arange(first, first + rows.rows, dtype=np.int32), np.diff(offsets))
        document = np.arange(self._documents, self._documents + len(row), dtype=np.int32)
        self._documents += len(row)
        columns = {"sequence": sequence, "document": document, "row": row, "tokens": tokens, "supervised": supervised}
        self._by_sequence.add("sequence", pa.record_batch(columns))

    def finish(self) -> None:
        copied = [name for name in self._schema.names if name in COPIED]
        for number, index in enumerate(self._parts.ranges(self._split, copied, self._each)):
            for batch in self._by_sequence.read(number):
                at = pc.subtract(batch["sequence"], number * self._each)
                columns = {name: batch[name] for name in ("document", "row", "tokens", "supervised")}
                columns |= {name: index[name].take(at).combine_chunks() for name in copied}
                self._by_document.add("document", pa.record_batch(columns))
        for number in range(-(-self._documents // self._each)):
            table = pa.Table.from_batches(list(self._by_document.read(number))).combine_chunks()
            order = np.empty(len(table), np.int32)
            order[table["document"].to_numpy() - number * self._each] = np.arange(len(table), dtype=np.int32)
            for start in range(0, len(table), ROWS_PER_BATCH):
                batch = table.take(pa.array(order[start : start + ROWS_PER_BATCH]))
                batch = batch.append_column("split", pa.repeat(self._split, len(batch)))
                self._batches.add(batch[name].combine_chunks() for name in self._schema.names)
        self._batches.finish()


class _Ranges:
    """Record batches divided by a column of numbers into ranges of `each` numbers; in files if there are several ranges."""

    def __init__(self, folder: Path, each: int, most: int):
        self._folder, self._each, self._in_memory = folder, each, most <= each
        self._batches: list[pa.RecordBatch] = []
        self._files: dict[int, Any] = {}

    def add(self, column: str, batch: pa.RecordBatch) -> None:
        if self._in_memory:
            self._batches.append(batch)
            return
        number = (batch[column].to_numpy() // self._each).astype(np.uint16)
        order = np.argsort(number, kind="stable")
        numbers, counts = np.unique(number, return_counts=True)
        batch, start = batch.take(pa.array(order)), 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[number] = pa.ipc.new_stream(str(self._folder / str(number)), batch.schema)
            self._files[number].write_batch(batch.slice(start, count))
            start += count

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a range, in the order in which they were added, and remove them."""
        if self._in_memory:
            yield from self._batches
        elif number in self._files:
            self._files.pop(number).close()
            path = self._folder / str(number)
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                yield from reader
            path.unlink()
