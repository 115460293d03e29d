"""The format of a file, by its first bytes; by its name only where they are ambiguous."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import BinaryIO, Literal, NamedTuple

from snaketune.corpus.reading.delimiters import delimiter_of
from snaketune.corpus.reading.encodings import UTF_8
from snaketune.corpus.reading.unreadable_formats import refuse
from snaketune.errors import SnaketuneError

Format = Literal["parquet", "arrow", "json", "csv", "text"]
# Opens a file, decompressed, at its beginning; can be called repeatedly.
Opener = Callable[[], BinaryIO]

HEAD_LENGTH = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TABLES: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
SUPPORTED_FORMATS = (
    "JSON, JSON lines, CSV (with a header, or the source's `header`; cells between commas, tabs, semicolons or bars, or the "
    "source's `delimiter`), Parquet and Arrow, each also as .gz, .xz or .zst, or within a .zip or .tar"
)
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
CSV_SUFFIXES = (".csv", ".tsv")
DATA_SUFFIXES = (*JSON_SUFFIXES, *CSV_SUFFIXES, ".parquet", ".arrow")
# The beginning of an object or an array, as far as the first line shows it.
JSON_START = re.compile(rb'\s*(\{\s*(["}]|\Z)|\[\s*([\[{"\]]|\Z))')
LINES_CHECKED = 20


class TextKeys(NamedTuple):
    """The keys of a source that apply to text files."""

    encoding: str = UTF_8
    delimiter: str | None = None
    header: tuple[str, ...] = ()

    @property
    def set_keys(self) -> list[str]:
        """The keys that differ from their defaults."""
        return [key for key, value in self._asdict().items() if value != TextKeys._field_defaults[key]]


DEFAULT_KEYS = TextKeys()


def table_format(head: bytes) -> Format | None:
    """Return the format of a Parquet or Arrow file, by its first bytes; None for other files."""
    return next((format_ for magic, format_ in TABLES.items() if head.startswith(magic)), None)


def format_of(head: bytes, display_name: str, *, plain: bool = False, keys: TextKeys = DEFAULT_KEYS) -> Format:
    """Return the format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, decompressed, in UTF-8 where the keys name an encoding.
        display_name: its name in messages.
        plain: whether a file in no other format is a text; commas then make it CSV only if its name ends in .csv or .tsv.
        keys: keys of its source for text files.
    Raises:
        SnaketuneError: no supported format, or one that a key doesn't apply to.
    """
    if table := table_format(head):
        if keys.set_keys:
            raise SnaketuneError(
                f"{display_name}: `{keys.set_keys[0]}` is for text files, and this is {table}; "
                "make it a source without that key"
            )
        return table
    refuse(head, display_name)
    suffix = suffix_of(display_name)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream in an old format: its reader decides, unless this is plainly text.
        return _text_format(head, display_name, keys) or ("parquet" if suffix == ".parquet" else "arrow")
    text_format = _text_format(head, display_name, keys)
    if plain and (
        text_format is None
        or (text_format == "csv" and suffix not in CSV_SUFFIXES and not (keys.delimiter or keys.header))
    ):
        return "text"
    if text_format is None:
        read_as = f" (read as {keys.encoding}, the source's `encoding`)" if keys.encoding != UTF_8 else ""
        raise SnaketuneError(
            f"{display_name} is in none of the supported formats: {SUPPORTED_FORMATS}{read_as}; write it in one of them"
        )
    return text_format


def _text_format(head: bytes, display_name: str, keys: TextKeys) -> Format | None:
    suffix = suffix_of(display_name)
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()][:LINES_CHECKED]
    begins_json = [bool(JSON_START.match(line)) for line in lines]
    if keys.delimiter or keys.header:
        if suffix in JSON_SUFFIXES and any(begins_json[:1]):
            raise SnaketuneError(
                f"{display_name}: `{keys.set_keys[-1]}` is for CSV files, and this is JSON; make it a source without that key"
            )
        return "csv"
    if suffix in JSON_SUFFIXES:
        if not any(begins_json) and csv_delimiter(head, display_name):
            return "csv"
        return "json" if any(begins_json) or keys.encoding == UTF_8 else None
    if any(begins_json[:1]):
        return "json"
    return "csv" if suffix in CSV_SUFFIXES or csv_delimiter(head, display_name) else None


def csv_delimiter(head: bytes, display_name: str, columns: int | None = None) -> str | None:
    """Return the delimiter of a file if its first rows are CSV, else None.

    Args:
        columns: the number of columns of a file without a header.
    """
    return delimiter_of(head, whole=len(head) < HEAD_LENGTH, tabs=suffix_of(display_name) == ".tsv", columns=columns)


def suffix_of(display_name: str) -> str:
    """Return the suffix of a name without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    name = PurePath(display_name.lower())
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix
