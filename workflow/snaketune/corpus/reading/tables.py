"""Parquet files and Arrow files and streams to raw rows: bytes that are UTF-8 become text, maps objects, and NaN null."""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.types as types

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.reading.formats import BYTES_PER_READ, Opener
from snaketune.corpus.rows import NAN_AS_NULL, RawRow, bytes_as_text, nan_as_null, without_nulls
from snaketune.errors import SnaketuneError

ROWS_PER_READ = 1024
MAX_DECOMPRESSED = 1 << 30


def read_parquet(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read the rows of a Parquet file.

    Raises:
        ArrowException, OSError: the file is damaged.
        SnaketuneError: a column is there twice or can't be read, or the file is compressed and too large for memory.
    """
    from pyarrow.parquet import ParquetFile

    return rows_of_batches(ParquetFile(_buffer(opener, display_name)).iter_batches(ROWS_PER_READ), display_name)


def read_arrow(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read the rows of an Arrow file or stream; raises what `read_parquet` raises."""
    buffer = _buffer(opener, display_name)
    try:
        reader = pa.ipc.open_file(buffer)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        buffer.seek(0)
        batches = pa.ipc.open_stream(buffer)
    return rows_of_batches(batches, display_name)


def _buffer(opener: Opener, display_name: str) -> pa.NativeFile:
    """Map the file if it isn't compressed, else decompress it into memory."""
    with opener() as file:
        raw = getattr(file, "raw", None)
        if isinstance(raw, io.FileIO):
            return pa.memory_map(str(raw.name))
        decompressed = pa.BufferOutputStream()
        while block := file.read(BYTES_PER_READ):
            if decompressed.tell() + len(block) > MAX_DECOMPRESSED:
                raise SnaketuneError(
                    f"{display_name} is a compressed table of more than {MAX_DECOMPRESSED >> 20} MB, which would have to be "
                    "decompressed in memory; decompress it, and it is read from disk"
                )
            decompressed.write(block)
        return pa.BufferReader(decompressed.getvalue())


def rows_of_batches(batches: Iterable[pa.RecordBatch], display_name: str) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise SnaketuneError(f"{display_name}: the table has the column {duplicate!r} twice; rename one of them")
        # Unchecked, invalid offsets would read arbitrary memory.
        batch.validate(full=True)
        fixes = {field.name: found for field in batch.schema if (found := _fixes(field.type))}
        for start in range(0, batch.num_rows, ROWS_PER_READ):
            try:
                rows = batch.slice(start, ROWS_PER_READ).to_pylist(maps_as_pydicts="strict")
            except (OverflowError, ValueError, LookupError) as error:
                # For instance a date out of Python's range, or a map with a key twice.
                what = f"{str(error)[:EXCERPT_LENGTH]}; write this column as text, or leave it out"
                raise SnaketuneError(
                    f"{display_name}, in {ROWS_PER_READ} rows from row {number + 1} on: {what}"
                ) from None
            for row in rows:
                number += 1
                notes: tuple[str, ...] = ()
                for name, functions in fixes.items():
                    for function in functions:
                        value = function(row[name])
                        if function is nan_as_null and value is not row[name]:
                            notes = NAN_AS_NULL
                        row[name] = value
                yield RawRow("row", number, row, notes)


def _fixes(type_: pa.DataType) -> list[Callable[[Any], Any]]:
    """The functions that values of a type need."""
    fixes = {
        nan_as_null: types.is_floating,
        # Where a table has a struct, every object has the keys of all objects.
        without_nulls: types.is_struct,
        bytes_as_text: lambda inner: types.is_binary(inner) or types.is_large_binary(inner),
    }
    return [function for function, fits in fixes.items() if _holds(type_, fits)]


def _holds(type_: pa.DataType, fits: Callable[[pa.DataType], bool]) -> bool:
    return fits(type_) or any(_holds(type_.field(i).type, fits) for i in range(type_.num_fields))
