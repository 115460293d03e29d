"""Arrow IPC files: written in batches, read by memory map."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.errors import SnaketuneError


def write_table(path: Path, table: pa.Table, rows_per_batch: int = 1024) -> None:
    """Write an Arrow IPC file, uncompressed so that readers can map it."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)


class BatchWriter:
    """Writes columns of any length as record batches of a fixed length; the last one, which `finish` writes, has the rest."""

    def __init__(self, writer: pa.RecordBatchFileWriter, schema: pa.Schema, rows_per_batch: int):
        self._writer, self._schema, self._rest = writer, schema, schema.empty_table()
        self._rows_per_batch = rows_per_batch

    def add(self, columns: Iterable[np.ndarray | pa.Array]) -> None:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
        table = pa.concat_tables([self._rest, pa.Table.from_arrays(arrays, schema=self._schema)])
        whole = len(table) // self._rows_per_batch * self._rows_per_batch
        if whole:
            table = table.combine_chunks()
            self._writer.write_table(table.slice(0, whole), max_chunksize=self._rows_per_batch)
        self._rest = table.slice(whole)

    def finish(self) -> None:
        self._writer.write_table(self._rest.combine_chunks())


def read_table(path: Path) -> pa.Table:
    """Memory-map an Arrow IPC file (or stream, as `datasets` writes them); SnaketuneError if it is neither."""
    try:
        # What is read stays mapped once the file is closed, so that thousands of files can be read.
        with pa.memory_map(str(path)) as source:
            try:
                return pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                return pa.ipc.open_stream(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise SnaketuneError(f"{path} can't be read as an Arrow file: {error}") from None


def count_rows(path: Path) -> int:
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
