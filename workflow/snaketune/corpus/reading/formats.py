"""What a file is, told by its first bytes; its name decides only where they leave it open."""

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import BinaryIO, Literal, NamedTuple

from snaketune.corpus.reading.delimiters import delimiter_of
from snaketune.corpus.reading.encodings import UTF_8
from snaketune.corpus.reading.unreadable_formats import refuse
from snaketune.errors import SnaketuneError

Format = Literal["parquet", "arrow", "json", "csv", "text"]
# Opens a file, unpacked, at its beginning, as often as it is called.
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
# The beginning of an object or an array, of what the first line shows of it.
JSON_START = re.compile(rb'\s*(\{\s*(["}]|\Z)|\[\s*([\[{"\]]|\Z))')
LINES_CHECKED = 20


class TextKeys(NamedTuple):
    """What a source says of its text files."""

    encoding: str = UTF_8
    delimiter: str | None = None
    header: tuple[str, ...] = ()

    @property
    def set_keys(self) -> list[str]:
        """The keys that are set."""
        return [key for key, value in self._asdict().items() if value != TextKeys._field_defaults[key]]


DEFAULT_KEYS = TextKeys()


def table_format(head: bytes) -> Format | None:
    """The format of a table, by its first bytes."""
    return next((format_ for magic, format_ in TABLES.items() if head.startswith(magic)), None)


def format_of(head: bytes, display_name: str, *, plain: bool = False, keys: TextKeys = DEFAULT_KEYS) -> Format:
    """The format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, unpacked, in UTF-8 where the keys name an encoding.
        shown: its name.
        plain: whether a file in no other format is a text; commas then make no CSV unless it is called so.
        keys: what its source says of text files.
    Raises:
        SnaketuneError: none that is read here, or one that a key isn't for.
    """
    if table := table_format(head):
        if keys.set_keys:
            raise SnaketuneError(
                f"{display_name}: `{keys.set_keys[0]}` is for text files, and this is {table}; make it a source without that key"
            )
        return table
    refuse(head, display_name)
    suffix = suffix_of(display_name)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream as it was once written: its reader knows, unless this is plainly text.
        return _text_format(head, display_name, keys) or ("parquet" if suffix == ".parquet" else "arrow")
    text_format = _text_format(head, display_name, keys)
    if plain and (
        text_format is None
        or (text_format == "csv" and suffix not in CSV_SUFFIXES and not (keys.delimiter or keys.header))
    ):
        return "text"
    if text_format is None:
        read_as = f" (read as {keys.encoding}, the source's `encoding`)" if keys.encoding != UTF_8 else ""
        raise SnaketuneError(f"{display_name} is none of the formats that are read here: {SUPPORTED_FORMATS}{read_as}")
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
    """What separates cells in a file, if it is CSV by its first rows; `columns` is how many there are without a header."""
    return delimiter_of(head, whole=len(head) < HEAD_LENGTH, tabs=suffix_of(display_name) == ".tsv", columns=columns)


def suffix_of(display_name: str) -> str:
    """What a file is called by, however it is packed: `.jsonl` of `a.jsonl.gz`."""
    name = PurePath(display_name.lower())
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix
