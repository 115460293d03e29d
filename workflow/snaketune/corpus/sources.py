"""Files and Hub datasets to raw rows, one at a time.

Text files and tables are streamed; a .json that holds one array is the exception, it is parsed whole. A row that can't
be read is handed on as the reason why; a file that can't be read, or breaks off in the middle, ends the stage, because
nobody knows how much of it is missing.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow as pa

from snaketune.config.corpora import HubDataset
from snaketune.corpus.rows import Malformed
from snaketune.corpus.text_files import read_csv, read_json
from snaketune.errors import SnaketuneError

GZIP_MAGIC = b"\x1f\x8b"
ROWS_PER_READ = 1024
NOT_THERE_OR_BROKEN = (OSError, EOFError, zlib.error, pa.ArrowException)


class RawRow(NamedTuple):
    """A row as it was found, or why there is none, and where: the line of a text file, else the number of the row."""

    unit: Literal["line", "row"]
    number: int
    found: dict[str, Any] | Malformed


def read_file(path: Path, shown: str) -> Iterator[RawRow]:
    """Rows of one file.

    Args:
        path: where it is.
        shown: its name in messages, as the config has it.
    Raises:
        SnaketuneError: missing, empty, cut off, or of no known format.
    """
    suffix = Path(shown.lower().removesuffix(".gz")).suffix
    if suffix not in READERS:
        raise SnaketuneError(
            f"{shown}: unknown format {suffix!r}; expected {', '.join(READERS)}, or one of them as .gz"
        )
    rows = 0
    try:
        with _open(path) as file:
            for rows, row in enumerate(READERS[suffix](file, shown), start=1):  # noqa: B007
                yield RawRow(*row)
    except FileNotFoundError:
        raise SnaketuneError(f"{shown} doesn't exist; `files` are relative to the working directory") from None
    except NOT_THERE_OR_BROKEN as error:
        raise SnaketuneError(
            f"{shown} can't be read: {str(error) or type(error).__name__}. It may be damaged or cut off; fetch it again"
        ) from None
    if not rows:
        raise SnaketuneError(f"{shown} holds no rows; fetch it again, or take it out of the corpus")


def read_hub(hub: HubDataset) -> Iterator[RawRow]:
    """Rows of a Hub dataset, through the cache of `datasets`.

    Raises:
        SnaketuneError: it can't be had.
    """
    from datasets import load_dataset

    try:
        dataset = load_dataset(hub.path, hub.name, split=hub.split, revision=hub.revision)
    except Exception as error:  # whatever the network, the Hub or a loader can raise
        raise SnaketuneError(
            f"{hub_name(hub)} can't be loaded: {type(error).__name__}: {error}. Check path, name, split and revision, "
            "and the network (or HF_HOME, where it was downloaded to)"
        ) from None
    if not len(dataset):
        raise SnaketuneError(f"{hub_name(hub)} holds no rows; check its split")
    for number, row in enumerate(dataset, start=1):
        yield RawRow("row", number, row)


def hub_name(hub: HubDataset) -> str:
    """How messages and the quarantine call a Hub dataset.

    >>> hub_name(HubDataset(path="openai/gsm8k", name="main", revision="main"))
    'openai/gsm8k (main, train) at main'
    """
    return f"{hub.path} ({f'{hub.name}, ' if hub.name else ''}{hub.split}) at {hub.revision}"


def _open(path: Path) -> BinaryIO:
    # By content and not by suffix: downloaders like to unpack a .gz and keep its name.
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    return gzip.open(path) if zipped else path.open("rb")


def _buffer(file: BinaryIO) -> pa.NativeFile:
    return pa.BufferReader(file.read()) if isinstance(file, gzip.GzipFile) else pa.memory_map(file.name)


def _read_parquet(file: BinaryIO, shown: str) -> Iterator[tuple[str, int, Any]]:
    from pyarrow.parquet import ParquetFile

    return _batch_rows(ParquetFile(_buffer(file)).iter_batches(ROWS_PER_READ))


def _read_arrow(file: BinaryIO, shown: str) -> Iterator[tuple[str, int, Any]]:
    buffer = _buffer(file)
    try:
        reader = pa.ipc.open_file(buffer)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        buffer.seek(0)
        batches = pa.ipc.open_stream(buffer)
    return _batch_rows(batches)


def _batch_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, Any]]:
    rows = (
        row
        for batch in _distinct_columns(batches)
        for start in range(0, batch.num_rows, ROWS_PER_READ)
        for row in _python_rows(batch.slice(start, ROWS_PER_READ))
    )
    return (("row", number, row) for number, row in enumerate(rows, start=1))


def _distinct_columns(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SnaketuneError(f"a table has the column {twice!r} twice; rename one of them")
        yield batch


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | Malformed]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [Malformed("not_utf8", f"{error.reason} in a text column")]
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]
    except (OverflowError, ValueError, LookupError) as error:
        # A date out of Python's range, say, in a column that may not even be needed.
        if batch.num_rows == 1:
            return [Malformed("unreadable_value", str(error)[:200])]
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1))]


READERS: dict[str, Callable[[BinaryIO, str], Iterator[tuple[str, int, Any]]]] = {
    ".json": read_json,
    ".jsonl": read_json,
    ".csv": read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
