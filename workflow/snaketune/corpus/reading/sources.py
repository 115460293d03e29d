"""Files and Hub datasets to raw rows, one at a time.

All of them are streamed. A row that can't be read is handed on as the reason why; a file that can't be read, or breaks
off in the middle, ends the stage, because nobody knows how much of it is missing.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from snaketune.config.corpora import HubDataset
from snaketune.corpus.raw import NAN_AS_NULL, RawRow, nan_as_null, without_nulls
from snaketune.corpus.reading.csv_files import read_csv
from snaketune.corpus.reading.formats import GZIP_MAGIC, HEAD_LENGTH, ZSTD_MAGIC, format_of
from snaketune.corpus.reading.json_files import read_json
from snaketune.corpus.reading.parquet_arrow import read_arrow, read_parquet
from snaketune.corpus.reading.plain_text import read_text
from snaketune.errors import SnaketuneError

READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet, "arrow": read_arrow, "text": read_text}
NOT_THERE_OR_BROKEN = (OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException)
BYTES_PER_READ = 1 << 20


def read_file(path: Path, shown: str, *, plain: bool = False) -> Iterator[RawRow]:
    """Rows of one file.

    Args:
        path: where it is.
        shown: its name in messages, as the config has it.
        plain: whether a file in no other format is a text.
    Raises:
        SnaketuneError: missing, empty, cut off, or of no known format.
    """
    rows = 0
    try:
        if path.exists() and not path.is_file():
            what = "a folder; name the files in it" if path.is_dir() else "no regular file; write its rows to one"
            raise SnaketuneError(f"{shown} is {what}")
        opening = partial(open_unpacked, path)
        with opening() as file:
            head = file.read(HEAD_LENGTH)
        if head:
            for rows, row in enumerate(READERS[format_of(head, shown, plain=plain)](opening, shown), start=1):  # noqa: B007
                yield row
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
        made = nan_as_null(row)
        found = {column: without_nulls(value) for column, value in made.items()}
        yield RawRow("row", number, found, () if made is row else NAN_AS_NULL)


def hub_name(hub: HubDataset) -> str:
    """How messages and the quarantine call a Hub dataset.

    >>> hub_name(HubDataset(path="openai/gsm8k", name="main", revision="main"))
    'openai/gsm8k (main, train) at main'
    """
    return f"{hub.path} ({f'{hub.name}, ' if hub.name else ''}{hub.split}) at {hub.revision}"


def open_unpacked(path: Path) -> BinaryIO:
    """The file, unpacked. By content and not by suffix: downloaders like to unpack a .gz and keep its name."""
    with path.open("rb") as file:
        magic = file.read(len(ZSTD_MAGIC))
    if magic.startswith(GZIP_MAGIC):
        return gzip.open(path)
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), BYTES_PER_READ)
    return path.open("rb", buffering=BYTES_PER_READ)
