"""Files and Hub datasets to raw rows, one at a time.

All of them are streamed. A row that can't be read is handed on as the reason why; a file that can't be read, or breaks
off in the middle, ends the stage, because nobody knows how much of it is missing.
"""

import codecs
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa

from snaketune.config.corpus_sources import HubDataset
from snaketune.corpus.excerpts import printable, say
from snaketune.corpus.raw_rows import NAN_AS_NULL, RawRow, nan_as_null, without_nulls
from snaketune.corpus.reading.archives import BadZipFile, is_tar, is_zip, tar_members, zip_members
from snaketune.corpus.reading.csv_files import read_csv
from snaketune.corpus.reading.decompression import open_unpacked, unpacked
from snaketune.corpus.reading.encodings import UTF_8, as_utf8, not_in
from snaketune.corpus.reading.formats import (
    DATA_SUFFIXES,
    HEAD_LENGTH,
    UNNAMED,
    Opening,
    TextKeys,
    format_of,
    suffix_of,
    table_of,
)
from snaketune.corpus.reading.json_files import read_json
from snaketune.corpus.reading.parquet_arrow import read_arrow, read_parquet
from snaketune.corpus.reading.plain_text import read_text
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet, "arrow": read_arrow, "text": read_text}
NOT_THERE_OR_BROKEN = (
    OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, BadZipFile, pa.ArrowException
)  # fmt: skip
# What stands beside data in an archive.
BESIDE_DATA = {"readme", "license", "licence", "copying", "notice", "changelog", "authors", "citation"}
MOST_NAMES = 20


def read_files(
    path: Path, shown: str, *, plain: bool = False, keys: TextKeys = UNNAMED
) -> Iterator[tuple[str, Iterator[RawRow]]]:
    """The files in a file, each with its name and its rows: itself; or of an archive, those in a format that is read here.

    Args:
        path: where it is.
        shown: its name in messages, as the config has it.
        plain: whether a file in no other format is a text.
        keys: what its source says of text files.
    Raises:
        SnaketuneError: missing, empty, cut off, or of no known format.
    """
    with _broken(shown):
        if path.exists() and not path.is_file():
            what = "a folder; name the files in it" if path.is_dir() else "no regular file; write its rows to one"
            raise SnaketuneError(f"{shown} is {what}")
        opening = partial(open_unpacked, path)
        if is_zip(path):
            members = zip_members(path, shown)
        elif is_tar(_head(opening)):
            members = tar_members(opening, shown)
        else:
            yield shown, _rows(opening, shown, plain, keys)
            return
        read, unread = 0, []
        for member in members:
            name = f"{shown}/{printable(member.name)}"
            if member.opening and _holds_data(opening := partial(unpacked, member.opening), member.name, plain, keys):
                read += 1
                yield name, _rows(opening, name, plain, keys)
            else:
                unread.append(printable(member.name))
    names = ", ".join(sorted(unread)[:MOST_NAMES]) + (
        f" and {len(unread) - MOST_NAMES} more" if len(unread) > MOST_NAMES else ""
    )
    if not read:
        raise SnaketuneError(
            f"{shown} holds no file that is read here, but {names or 'none at all'}; unpack it, and name its files"
        )
    if unread:
        say(f"{shown}: not read: {names}")


def read_file(path: Path, shown: str, *, plain: bool = False, keys: TextKeys = UNNAMED) -> Iterator[RawRow]:
    """Rows of one file, or of all files in an archive; see `read_files`."""
    for _, rows in read_files(path, shown, plain=plain, keys=keys):
        yield from rows


@contextmanager
def _broken(shown: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise SnaketuneError(f"{shown} doesn't exist; `files` are relative to the working directory") from None
    except NOT_THERE_OR_BROKEN as error:
        raise SnaketuneError(
            f"{shown} can't be read: {str(error) or type(error).__name__}. It may be damaged or cut off; fetch it again"
        ) from None


def _head(opening: Opening) -> bytes:
    with opening() as file:
        return file.read(HEAD_LENGTH)


def _in_utf8(opening: Opening, shown: str, keys: TextKeys) -> tuple[Opening, bytes]:
    """A file, in UTF-8 if it is a text, and how it begins."""
    head = _head(opening)
    if keys.encoding == UTF_8 or table_of(head):
        return opening, head

    def recoded() -> BinaryIO:
        return as_utf8(opening(), keys.encoding, shown)

    return recoded, _head(recoded)


def _rows(opening: Opening, shown: str, plain: bool, keys: TextKeys) -> Iterator[RawRow]:
    rows = 0
    with _broken(shown):
        opening, head = _in_utf8(opening, shown, keys)
        if head:
            format_ = format_of(head, shown, plain=plain, keys=keys)
            by_keys = (keys,) if format_ in ("json", "csv") else ()
            raws = READERS[format_](opening, shown, *by_keys)
            if keys.encoding != UTF_8:
                raws = _not_in_encoding(raws, keys.encoding)
            for rows, row in enumerate(raws, start=1):  # noqa: B007
                yield row
    if not rows:
        raise SnaketuneError(f"{shown} holds no rows; fetch it again, or take it out of the corpus")


def _not_in_encoding(raws: Iterator[RawRow], encoding: str) -> Iterator[RawRow]:
    """`raws`; where one isn't UTF-8, it wasn't in the encoding that it is read in."""
    for raw in raws:
        if isinstance(raw.found, Malformed) and raw.found.reason == "not_utf8":
            raw = raw._replace(found=Malformed("not_utf8", not_in(encoding), raw.found.excerpt))
        yield raw


def _holds_data(opening: Opening, shown: str, plain: bool, keys: TextKeys) -> bool:
    """Whether a member of an archive is read: it is called as data is, or is data, and not about them."""
    path = PurePosixPath(shown)
    if path.stem.lower() in BESIDE_DATA or any(part.startswith((".", "__MACOSX")) for part in path.parts):
        return False
    if suffix_of(shown) in DATA_SUFFIXES:
        return True
    try:
        opening, head = _in_utf8(opening, shown, keys)
        format_ = format_of(head, shown, plain=plain, keys=keys)
    except SnaketuneError:
        return False
    return bool(head) and not is_tar(head) and (format_ not in ("csv", "text") or not _is_binary(head))


def _is_binary(head: bytes) -> bool:
    """Whether what begins like this is no text in UTF-8; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return b"\0" in head


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
