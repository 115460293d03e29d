"""Parquet files and Arrow files and streams to raw rows."""

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.reading.formats import Opener
from snaketune.corpus.rows import Malformed, RawRow, table_row
from snaketune.errors import SnaketuneError
from snaketune.remote_files import is_remote_reader

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

ROWS_PER_READ = 1024
BYTES_PER_READ = 1 << 20
MAX_DECOMPRESSED = 1 << 30


def read_parquet(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read the rows of a Parquet file.

    Raises:
        ArrowException, OSError: the file is damaged.
        SnaketuneError: a column is there twice, or the file is compressed and too large to decompress in memory.
    """
    return _rows(_parquet(opener, display_name).iter_batches(ROWS_PER_READ), display_name)


def _parquet(opener: Opener, display_name: str) -> "ParquetFile":
    from pyarrow.parquet import ParquetFile

    # Else all row groups would be fetched at once.
    return ParquetFile(_buffer(opener, display_name), pre_buffer=False)


def parquet_groups(opener: Opener, display_name: str) -> int:
    """The number of row groups of a Parquet file."""
    return _parquet(opener, display_name).num_row_groups


def read_parquet_groups(opener: Opener, display_name: str, groups: range) -> Iterator[RawRow]:
    """Yield the rows of consecutive row groups, numbered as in the whole file. Raises what `read_parquet` raises."""
    file = _parquet(opener, display_name)
    first = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
    batches = file.iter_batches(ROWS_PER_READ, row_groups=list(groups)) if groups else ()
    for raw in _rows(batches, display_name):
        yield raw._replace(number=first + raw.number)


def read_arrow(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read the rows of an Arrow file or stream; raises what `read_parquet` raises."""
    buffer = _buffer(opener, display_name)
    try:
        reader = pa.ipc.open_file(buffer)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        buffer.seek(0)
        batches = pa.ipc.open_stream(buffer)
    return _rows(batches, display_name)


def _buffer(opener: Opener, display_name: str) -> pa.NativeFile:
    """Map the file if it isn't compressed, or read it in parts if it is remote; else decompress it into memory."""
    file = opener()
    if is_remote_reader(file):
        return pa.PythonFile(file, "r")
    with file:
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


def _rows(batches: Iterable[pa.RecordBatch], display_name: str) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        _check(batch, display_name)
        for start in range(0, batch.num_rows, ROWS_PER_READ):
            for row in _python_rows(batch.slice(start, ROWS_PER_READ)):
                number += 1
                yield RawRow("row", number, row) if isinstance(row, Malformed) else table_row(number, row)


def _check(batch: pa.RecordBatch, display_name: str) -> None:
    names = batch.schema.names
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise SnaketuneError(f"{display_name}: the table has the column {duplicate!r} twice; rename one of them")
    # Unchecked, invalid offsets would read arbitrary memory.
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        # A text that isn't UTF-8 makes one row malformed, below, and doesn't fail the file; so check again with bytes
        # for texts.
        for column in batch.columns:
            column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(type_: pa.DataType) -> pa.DataType:
    """Return `type_` with bytes for texts, at all depths that messages have; the memory layout is the same."""
    if pa.types.is_string(type_):
        return pa.binary()
    if pa.types.is_large_string(type_):
        return pa.large_binary()
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in type_])
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        of_list = pa.list_ if pa.types.is_list(type_) else pa.large_list
        return of_list(type_.value_field.with_type(_as_bytes(type_.value_type)))
    if pa.types.is_map(type_):
        return pa.map_(_as_bytes(type_.key_type), _as_bytes(type_.item_type))
    return type_


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | Malformed]:
    """Return each row, or why it can't be read. Maps become objects."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        malformed = Malformed("not_utf8", f"{error.reason} in a text column")
    except (OverflowError, ValueError, LookupError) as error:
        # For instance a date out of Python's range, in a column that may not even be needed.
        malformed = Malformed("unreadable_value", str(error)[:EXCERPT_LENGTH])
    if batch.num_rows == 1:
        return [malformed]
    return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]
