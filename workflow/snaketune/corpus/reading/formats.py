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
Opening = Callable[[], BinaryIO]

HEAD_LENGTH = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TABLES: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
READ_HERE = (
    "JSON, JSON lines, CSV (with a header, or the source's `header`; cells between commas, tabs, semicolons or bars, or the "
    "source's `delimiter`), Parquet and Arrow, each also as .gz, .xz or .zst, or within a .zip or .tar"
)
PACKED = (".gz", ".xz", ".zst")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
CSV_SUFFIXES = (".csv", ".tsv")
DATA_SUFFIXES = (*JSON_SUFFIXES, *CSV_SUFFIXES, ".parquet", ".arrow")
# The beginning of an object or an array, of what the first line shows of it.
BEGINS_JSON = re.compile(rb'\s*(\{\s*(["}]|\Z)|\[\s*([\[{"\]]|\Z))')
LINES_LOOKED_AT = 20


class TextKeys(NamedTuple):
    """What a source says of its text files."""

    encoding: str = UTF_8
    delimiter: str | None = None
    header: tuple[str, ...] = ()

    @property
    def named(self) -> list[str]:
        """The keys that are set."""
        return [key for key, value in self._asdict().items() if value != TextKeys._field_defaults[key]]


UNNAMED = TextKeys()


def table_of(head: bytes) -> Format | None:
    """The format of a table, by its first bytes."""
    return next((format_ for magic, format_ in TABLES.items() if head.startswith(magic)), None)


def format_of(head: bytes, shown: str, *, plain: bool = False, keys: TextKeys = UNNAMED) -> Format:
    """The format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, unpacked, in UTF-8 where the keys name an encoding.
        shown: its name.
        plain: whether a file in no other format is a text; commas then make no CSV unless it is called so.
        keys: what its source says of text files.
    Raises:
        SnaketuneError: none that is read here, or one that a key isn't for.
    """
    if table := table_of(head):
        if keys.named:
            raise SnaketuneError(
                f"{shown}: `{keys.named[0]}` is for text files, and this is {table}; make it a source without that key"
            )
        return table
    refuse(head, shown)
    suffix = suffix_of(shown)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream as it was once written: its reader knows, unless this is plainly text.
        return _text_format(head, shown, keys) or ("parquet" if suffix == ".parquet" else "arrow")
    found = _text_format(head, shown, keys)
    if plain and (
        found is None or (found == "csv" and suffix not in CSV_SUFFIXES and not (keys.delimiter or keys.header))
    ):
        return "text"
    if found is None:
        read_as = f" (read as {keys.encoding}, the source's `encoding`)" if keys.encoding != UTF_8 else ""
        raise SnaketuneError(f"{shown} is none of the formats that are read here: {READ_HERE}{read_as}")
    return found


def _text_format(head: bytes, shown: str, keys: TextKeys) -> Format | None:
    suffix = suffix_of(shown)
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()][:LINES_LOOKED_AT]
    begins_json = [bool(BEGINS_JSON.match(line)) for line in lines]
    if keys.delimiter or keys.header:
        if suffix in JSON_SUFFIXES and any(begins_json[:1]):
            raise SnaketuneError(
                f"{shown}: `{keys.named[-1]}` is for CSV files, and this is JSON; make it a source without that key"
            )
        return "csv"
    if suffix in JSON_SUFFIXES:
        if not any(begins_json) and csv_delimiter(head, shown):
            return "csv"
        return "json" if any(begins_json) or keys.encoding == UTF_8 else None
    if any(begins_json[:1]):
        return "json"
    return "csv" if suffix in CSV_SUFFIXES or csv_delimiter(head, shown) else None


def csv_delimiter(head: bytes, shown: str, columns: int | None = None) -> str | None:
    """What separates cells in a file, if it is CSV by its first rows; `columns` is how many there are without a header."""
    return delimiter_of(head, whole=len(head) < HEAD_LENGTH, tabs=suffix_of(shown) == ".tsv", columns=columns)


def suffix_of(shown: str) -> str:
    """What a file is called by, however it is packed: `.jsonl` of `a.jsonl.gz`."""
    name = PurePath(shown.lower())
    return PurePath(name.stem).suffix if name.suffix in PACKED else name.suffix
