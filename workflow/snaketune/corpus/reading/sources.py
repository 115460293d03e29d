"""Files and Hub datasets to raw rows, streamed; for a row that can't be read the reason. A file that can't fails the stage."""

import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from snaketune.config.corpus_sources import HubDataset
from snaketune.corpus.reading.formats import HEAD_LENGTH, NO_KEYS, CsvKeys, format_of, open_decompressed
from snaketune.corpus.reading.json_files import read_json
from snaketune.corpus.reading.tables import read_arrow, read_parquet, rows_of_batches
from snaketune.corpus.reading.text_files import read_csv, read_text
from snaketune.corpus.rows import RawRow
from snaketune.errors import SnaketuneError

READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet, "arrow": read_arrow, "text": read_text}
READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, pa.ArrowException)
ROWS_PER_BATCH = 1024


def read_file(path: Path, display_name: str, *, plain: bool = False, keys: CsvKeys = NO_KEYS) -> Iterator[RawRow]:
    """Yield the rows of one file.

    Args:
        display_name: its name in messages, as in the config.
        plain: whether a file in no other format is a text.
        keys: keys of its source for CSV files.
    Raises:
        SnaketuneError: missing, empty, cut off, or in no supported format.
    """
    if path.exists() and not path.is_file():
        what = "a folder; name the files in it" if path.is_dir() else "not a regular file; write its rows to one"
        raise SnaketuneError(f"{display_name} is {what}")
    rows, opener = 0, partial(open_decompressed, path)
    try:
        with opener() as file:
            head = file.read(HEAD_LENGTH)
        if head:
            format_ = format_of(head, display_name, plain=plain, keys=keys)
            for rows, raw in enumerate(READERS[format_](opener, display_name, *[keys] * (format_ == "csv")), start=1):  # noqa: B007
                yield raw
    except FileNotFoundError:
        raise SnaketuneError(f"{display_name} doesn't exist; `files` are relative to the working directory") from None
    except READ_ERRORS as error:
        raise SnaketuneError(
            f"{display_name} can't be read: {str(error) or type(error).__name__}. It may be damaged or cut off; fetch it again"
        ) from None
    if not rows:
        raise SnaketuneError(f"{display_name} holds no rows; fetch it again, or remove it from the corpus")


def read_hub(hub: HubDataset) -> Iterator[RawRow]:
    """Yield the rows of a Hub dataset, through the cache of `datasets`.

    Raises:
        SnaketuneError: it can't be loaded.
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
    tables = dataset.with_format("arrow").iter(ROWS_PER_BATCH)
    yield from rows_of_batches((batch for table in tables for batch in table.to_batches()), hub_name(hub))


def hub_name(hub: HubDataset) -> str:
    """Return the name of a Hub dataset in messages and in the quarantine.

    >>> hub_name(HubDataset(path="openai/gsm8k", name="main", revision="main"))
    'openai/gsm8k (main, train) at main'
    """
    return f"{hub.path} ({f'{hub.name}, ' if hub.name else ''}{hub.split}) at {hub.revision}"
