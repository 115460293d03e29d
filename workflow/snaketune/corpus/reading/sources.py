"""Files and Hub datasets to raw rows, streamed; for a row that can't be read the reason. A file that can't fails the stage."""

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
from snaketune.corpus.excerpts import print_line, printable
from snaketune.corpus.reading.archives import (
    BadZipFile,
    TarError,
    decompressed,
    is_tar,
    is_zip,
    open_decompressed,
    tar_members,
    zip_members,
)
from snaketune.corpus.reading.encodings import UTF_8, as_utf8, wrong_encoding
from snaketune.corpus.reading.formats import (
    DATA_SUFFIXES,
    DEFAULT_KEYS,
    HEAD_LENGTH,
    Opener,
    TextKeys,
    format_of,
    suffix_of,
    table_format,
)
from snaketune.corpus.reading.json_files import read_json
from snaketune.corpus.reading.tables import read_arrow, read_parquet
from snaketune.corpus.reading.text_files import read_csv, read_text
from snaketune.corpus.rows import Malformed, RawRow, table_row
from snaketune.errors import SnaketuneError
from snaketune.locations import File

READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet, "arrow": read_arrow, "text": read_text}
READ_ERRORS = (
    OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, BadZipFile, TarError, pa.ArrowException
)  # fmt: skip
# Names of files in an archive that aren't data.
NOT_DATA_NAMES = {"readme", "license", "licence", "copying", "notice", "changelog", "authors", "citation"}
MAX_NAMES = 20


def read_files(
    path: File, display_name: str, *, plain: bool = False, keys: TextKeys = DEFAULT_KEYS
) -> Iterator[tuple[str, Iterator[RawRow]]]:
    """Yield name and rows of the file, or of each file in a supported format if it is an archive.

    Args:
        display_name: its name in messages, as in the config.
        plain: whether a file in no other format is a text.
        keys: keys of its source for text files.
    Raises:
        SnaketuneError: missing, empty, cut off, or in no supported format.
    """
    with explained_errors(display_name):
        if isinstance(path, Path) and path.exists() and not path.is_file():
            what = "a folder; name the files in it" if path.is_dir() else "not a regular file; write its rows to one"
            raise SnaketuneError(f"{display_name} is {what}")
        opener = partial(open_decompressed, path)
        if is_zip(path):
            members = zip_members(path, display_name)
        elif is_tar(_head(opener)):
            members = tar_members(opener, display_name)
        else:
            yield display_name, _rows(opener, display_name, plain, keys)
            return
        read, unread = 0, []
        for member in members:
            name = f"{display_name}/{printable(member.name)}"
            if member.opener and _holds_data(opener := partial(decompressed, member.opener), member.name, plain, keys):
                read += 1
                yield name, _rows(opener, name, plain, keys)
            else:
                unread.append(printable(member.name))
    more = f" and {len(unread) - MAX_NAMES} more" if len(unread) > MAX_NAMES else ""
    names = ", ".join(sorted(unread)[:MAX_NAMES]) + more
    if not read:
        raise SnaketuneError(
            f"{display_name} holds no file in a supported format ({names or 'it is empty'}); unpack it, and name its files"
        )
    if unread:
        print_line(f"{display_name}: not read: {names}")


def read_file(path: File, display_name: str, *, plain: bool = False, keys: TextKeys = DEFAULT_KEYS) -> Iterator[RawRow]:
    """Yield the rows of one file, or of all files in an archive; see `read_files`."""
    for _, rows in read_files(path, display_name, plain=plain, keys=keys):
        yield from rows


@contextmanager
def explained_errors(display_name: str) -> Iterator[None]:
    """Name the file in errors of reading it, and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise SnaketuneError(f"{display_name} doesn't exist; `files` are relative to the working directory") from None
    except READ_ERRORS as error:
        raise SnaketuneError(
            f"{display_name} can't be read: {str(error) or type(error).__name__}. It may be damaged or cut off; fetch it again"
        ) from None


def _head(opener: Opener) -> bytes:
    with opener() as file:
        return file.read(HEAD_LENGTH)


def _in_utf8(opener: Opener, display_name: str, keys: TextKeys) -> tuple[Opener, bytes]:
    """Return an opener of a file, converted to UTF-8 if it is a text, and its first bytes."""
    head = _head(opener)
    if keys.encoding == UTF_8 or table_format(head):
        return opener, head

    def recoded() -> BinaryIO:
        return as_utf8(opener(), keys.encoding, display_name)

    return recoded, _head(recoded)


def _rows(opener: Opener, display_name: str, plain: bool, keys: TextKeys) -> Iterator[RawRow]:
    rows = 0
    with explained_errors(display_name):
        opener, head = _in_utf8(opener, display_name, keys)
        if head:
            format_ = format_of(head, display_name, plain=plain, keys=keys)
            by_keys = (keys,) if format_ in ("json", "csv") else ()
            raws = READERS[format_](opener, display_name, *by_keys)
            for rows, raw in enumerate(raws, start=1):  # noqa: B007
                if keys.encoding != UTF_8 and isinstance(raw.value, Malformed) and raw.value.reason == "not_utf8":
                    reason = Malformed("not_utf8", wrong_encoding(keys.encoding), raw.value.excerpt)
                    yield raw._replace(value=reason)
                else:
                    yield raw
    if not rows:
        raise SnaketuneError(f"{display_name} holds no rows; fetch it again, or remove it from the corpus")


def _holds_data(opener: Opener, display_name: str, plain: bool, keys: TextKeys) -> bool:
    """Return True if a member of an archive is read: its suffix or content is that of data, and its name not a readme's."""
    path = PurePosixPath(display_name)
    if path.stem.lower() in NOT_DATA_NAMES or any(part.startswith((".", "__MACOSX")) for part in path.parts):
        return False
    if suffix_of(display_name) in DATA_SUFFIXES:
        return True
    try:
        opener, head = _in_utf8(opener, display_name, keys)
        format_ = format_of(head, display_name, plain=plain, keys=keys)
    except SnaketuneError:
        return False
    return bool(head) and not is_tar(head) and (format_ not in ("csv", "text") or not _is_binary(head))


def _is_binary(head: bytes) -> bool:
    """Return True if a file that begins like this isn't text in UTF-8; the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return b"\0" in head


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
    for number, row in enumerate(dataset, start=1):
        yield table_row(number, row)


def hub_name(hub: HubDataset) -> str:
    """Return the name of a Hub dataset in messages and in the quarantine.

    >>> hub_name(HubDataset(path="openai/gsm8k", name="main", revision="main"))
    'openai/gsm8k (main, train) at main'
    """
    return f"{hub.path} ({f'{hub.name}, ' if hub.name else ''}{hub.split}) at {hub.revision}"
