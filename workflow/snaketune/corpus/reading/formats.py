"""The format of a file, by its first bytes; by its name only where they are ambiguous. What isn't data is refused by name."""

import csv
import io
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from typing import BinaryIO, Literal, NamedTuple

from snaketune.corpus.reading.encodings import UTF_8, other_unicode
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
# The beginning of an object or an array, as far as the first line shows it; also of Python's repr, for which the reader of JSON
# has a message.
JSON_START = re.compile(rb'\s*(\{\s*(["\'}]|\Z)|\[\s*([\[{"\]]|\Z))')
# The first line that Excel writes and reads: the delimiter of the others.
DELIMITER_LINE = re.compile(r'"?sep=([^"\r\n])"?(?:\r\n?|\n)', re.IGNORECASE)
LINES_CHECKED, CSV_ROWS_CHECKED, BYTES_CHECKED = 20, 5, 1024

WORKBOOK = "save it as CSV, or write it as Parquet with pandas: read_excel(...).to_parquet(...)"
ARCHIVE = "which isn't supported; unpack it, and name the files in it"
# Files without rows, or in unsupported formats, by their first bytes.
UNREADABLE = {
    rb"PK(\x03\x04|\x05\x06)": f"is a zip archive inside another archive or a compressed file, {ARCHIVE}",
    rb"7z\xbc\xaf\x27\x1c": f"is a 7z archive, {ARCHIVE}",
    rb"Rar!\x1a\x07": f"is a RAR archive, {ARCHIVE}",
    rb"BZh": "is compressed with bzip2; decompress it, or compress it with gzip, xz or zstd",
    rb"version https://git-lfs": "is a Git LFS pointer and not the data; fetch that with `git lfs pull`",
    rb"%PDF-": "is a PDF, which holds no rows; extract the text, for instance with `pdftotext`",
    rb"SQLite format 3\0": "is an SQLite database; write a table of it as CSV: "
    "`sqlite3 -csv -header FILE 'select * from TABLE' > rows.csv`",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": f"is a document of Microsoft Office, as Excel's .xls; {WORKBOOK}",
    rb"\x80[\x02-\x05]": "is a Python pickle, which isn't read because it can run code; if you trust it, write it as Parquet "
    "with pandas: read_pickle(...).to_parquet(...)",
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b": "is a web page and not the "
    "data: a page to log in, or an error; fetch the file itself",
}
# Members that identify documents that are zip archives.
ZIP_DOCUMENTS = {
    r"xl/": f"is an Excel workbook; {WORKBOOK}",
    r"word/": "is a Word document, which holds no rows; save it as plain text",
    r"content\.xml": f"is a document of OpenOffice; a sheet: {WORKBOOK}",
    r".*data\.pkl": "is a PyTorch checkpoint, which holds no rows",
}


class TextKeys(NamedTuple):
    encoding: str = UTF_8
    delimiter: str | None = None
    header: tuple[str, ...] = ()

    @property
    def set_keys(self) -> list[str]:
        return [key for key, value in self._asdict().items() if value != TextKeys._field_defaults[key]]


DEFAULT_KEYS = TextKeys()


def table_format(head: bytes) -> Format | None:
    return next((format_ for magic, format_ in TABLES.items() if head.startswith(magic)), None)


def format_of(head: bytes, display_name: str, *, plain: bool = False, keys: TextKeys = DEFAULT_KEYS) -> Format:
    """Return the format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, decompressed, in UTF-8 where the keys name an encoding.
        plain: whether a file in no other format is a text; commas then make it CSV only if its name ends in .csv or .tsv.
        keys: keys of its source for text files.
    Raises:
        SnaketuneError: no supported format, or one that a key doesn't apply to.
    """
    if table := table_format(head):
        if keys.set_keys:
            what = f"`{keys.set_keys[0]}` is for text files, and this is {table}; make it a source without that key"
            raise SnaketuneError(f"{display_name}: {what}")
        return table
    _refuse(head, display_name)
    suffix = suffix_of(display_name)
    text_format = _text_format(head, display_name, keys)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream in an old format: its reader decides, unless this is plainly text.
        return text_format or ("parquet" if suffix == ".parquet" else "arrow")
    is_prose = text_format == "csv" and suffix not in CSV_SUFFIXES and not (keys.delimiter or keys.header)
    if plain and (text_format is None or is_prose):
        return "text"
    if text_format is None:
        read_as = f" (read as {keys.encoding}, the source's `encoding`)" if keys.encoding != UTF_8 else ""
        raise SnaketuneError(
            f"{display_name} is in none of the supported formats: {SUPPORTED_FORMATS}{read_as}; write it in one of them"
        )
    return text_format


def _refuse(head: bytes, display_name: str) -> None:
    """Raise SnaketuneError if a file begins like one that isn't data."""
    for pattern, what_to_do in UNREADABLE.items():
        if re.match(pattern, head[:BYTES_CHECKED], re.DOTALL):
            raise SnaketuneError(f"{display_name} {what_to_do}")
    if encoding := other_unicode(head):
        raise SnaketuneError(
            f"{display_name} is {encoding.upper()} and not UTF-8; set `encoding: {encoding}` of its source, "
            f"or write it again in UTF-8: `iconv -f {encoding.upper()} -t UTF-8`"
        )
    if head and not head.strip(b"\0"):
        what = "holds nothing but zero bytes, like a file that wasn't written completely; fetch it again"
        raise SnaketuneError(f"{display_name} {what}")


def refuse_zipped(names: list[str], display_name: str) -> None:
    """Raise SnaketuneError if the members of a zip archive are those of a document."""
    for pattern, what_to_do in ZIP_DOCUMENTS.items():
        if any(re.match(pattern, name) for name in names):
            raise SnaketuneError(f"{display_name} {what_to_do}")


def _text_format(head: bytes, display_name: str, keys: TextKeys) -> Format | None:
    suffix = suffix_of(display_name)
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()][:LINES_CHECKED]
    begins_json = [bool(JSON_START.match(line)) for line in lines]
    if keys.delimiter or keys.header:
        if suffix in JSON_SUFFIXES and any(begins_json[:1]):
            what = f"`{keys.set_keys[-1]}` is for CSV files, and this is JSON; make it a source without that key"
            raise SnaketuneError(f"{display_name}: {what}")
        return "csv"
    if suffix in JSON_SUFFIXES:
        if not any(begins_json) and csv_delimiter(head, display_name):
            return "csv"
        return "json" if any(begins_json) or keys.encoding == UTF_8 else None
    if any(begins_json[:1]):
        return "json"
    return "csv" if suffix in CSV_SUFFIXES or csv_delimiter(head, display_name) else None


def csv_delimiter(head: bytes, display_name: str, columns: int | None = None) -> str | None:
    r"""Return the delimiter that a line `sep=;` names; else the first with which all of the first rows have the same number of
    cells, and more than one.

    >>> csv_delimiter(b"prompt;response\na, b;c\nd;e\n", "a.csv"), csv_delimiter(b"sep=|\nprompt;x|response\n", "a.csv")
    (';', '|')

    Args:
        columns: the number of columns of a file without a header.
    """
    whole = head if len(head) < HEAD_LENGTH else head[: head.rfind(b"\n") + 1]
    text = whole.decode("utf-8-sig", "replace")
    if line := DELIMITER_LINE.match(text):
        return line[1]
    for delimiter in "\t,;|" if suffix_of(display_name) == ".tsv" else ",\t;|":
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        counts: list[int] = []
        # After an error, the rows before it count.
        with suppress(csv.Error):
            counts.extend(map(len, islice(filter(None, rows), CSV_ROWS_CHECKED)))
        enough = len(counts) > 1 if columns is None else counts[:1] == [columns]
        if enough and counts[0] > 1 and len(set(counts)) == 1:
            return delimiter
    return None


def suffix_of(display_name: str) -> str:
    """Return the suffix of a name without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    name = PurePath(display_name.lower())
    return PurePath(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix
