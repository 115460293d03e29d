"""The format of a file, by its first bytes; by its name only where they are ambiguous. What isn't data is refused by name."""

import csv
import gzip
import io
import lzma
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, NamedTuple

import pyarrow as pa

from snaketune.errors import SnaketuneError

Format = Literal["parquet", "arrow", "json", "csv", "text"]
# Opens a file, decompressed, at its beginning; can be called repeatedly.
Opener = Callable[[], BinaryIO]

HEAD_LENGTH = 64 * 1024
BYTES_PER_READ = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSION = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
TABLES: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
SUPPORTED_FORMATS = (
    "JSON, JSON lines, CSV (with a header, or the source's `header`; cells between commas, tabs, semicolons or bars, or the "
    "source's `delimiter`), Parquet and Arrow, each also as .gz, .xz or .zst, in UTF-8"
)
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
CSV_SUFFIXES = (".csv", ".tsv")
# The beginning of an object or an array, as far as the first line shows it; also of Python's repr, for which the reader of JSON
# has a message.
JSON_START = re.compile(rb'\s*(\{\s*(["\'}]|\Z)|\[\s*([\[{"\]]|\Z))')
# The first line that Excel writes and reads: the delimiter of the others.
DELIMITER_LINE = re.compile(r'"?sep=([^"\r\n])"?(?:\r\n?|\n)', re.IGNORECASE)
LINES_CHECKED, CSV_ROWS_CHECKED, BYTES_CHECKED = 20, 5, 1024

# Files without rows, or in unsupported formats, by their first bytes.
UNREADABLE = {
    rb"PK(\x03\x04|\x05\x06)|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "is a zip archive, or a document of Microsoft Office or "
    "OpenOffice; unpack an archive, and name the files in it; save a sheet as CSV, or write it as Parquet with pandas: "
    "read_excel(...).to_parquet(...)",
    rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|.{257}ustar": "is an archive; unpack it, and name the files in it",
    rb"BZh": "is compressed with bzip2; decompress it, or compress it with gzip, xz or zstd",
    rb"version https://git-lfs": "is a Git LFS pointer and not the data; fetch that with `git lfs pull`",
    rb"%PDF-": "is a PDF, which holds no rows; extract the text, for instance with `pdftotext`",
    rb"SQLite format 3\0": "is an SQLite database; write a table of it as CSV: "
    "`sqlite3 -csv -header FILE 'select * from TABLE' > rows.csv`",
    rb"\x80[\x02-\x05]": "is a Python pickle, which isn't read because it can run code; if you trust it, write it as Parquet "
    "with pandas: read_pickle(...).to_parquet(...)",
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b": "is a web page and not the "
    "data: a page to log in, or an error; fetch the file itself",
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff": "is UTF-16 or UTF-32 and not UTF-8; write it in UTF-8: `iconv -f UTF-16 -t UTF-8`",
    rb"\0+\Z": "holds nothing but zero bytes, like a file that wasn't written completely; fetch it again",
}


class CsvKeys(NamedTuple):
    """Keys of a source for CSV files."""

    delimiter: str | None = None
    header: tuple[str, ...] = ()


NO_KEYS = CsvKeys()


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file decompressed; by content, not by suffix, because some downloaders decompress a .gz and keep its name."""
    with path.open("rb") as file:
        head = file.read(max(map(len, COMPRESSION)))
    match compression_of(head):
        case "gzip":
            return io.BufferedReader(gzip.open(path), BYTES_PER_READ)
        case "xz":
            return io.BufferedReader(lzma.open(path), BYTES_PER_READ)
        case "zstd":
            return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), BYTES_PER_READ)
    return path.open("rb", buffering=BYTES_PER_READ)


def compression_of(head: bytes) -> str | None:
    return next((name for magic, name in COMPRESSION.items() if head.startswith(magic)), None)


def format_of(head: bytes, display_name: str, *, plain: bool = False, keys: CsvKeys = NO_KEYS) -> Format:
    """Return the format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, decompressed.
        plain: whether a file in no other format is a text; commas then make it CSV only if its name ends in .csv or .tsv.
        keys: keys of its source for CSV files.
    Raises:
        SnaketuneError: no supported format, or one that a key doesn't apply to.
    """
    key = next((key for key, value in keys._asdict().items() if value), None)
    table = next((format_ for magic, format_ in TABLES.items() if head.startswith(magic)), None)
    if table and key:
        raise SnaketuneError(
            f"{display_name}: `{key}` is for CSV files, and this is {table}; make it a source without it"
        )
    if table:
        return table
    for pattern, what_to_do in UNREADABLE.items():
        if re.match(pattern, head[:BYTES_CHECKED], re.DOTALL):
            raise SnaketuneError(f"{display_name} {what_to_do}")
    suffix = suffix_of(display_name)
    text_format = _text_format(head, display_name, key)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream in an old format: its reader decides, unless this is plainly text.
        return text_format or ("parquet" if suffix == ".parquet" else "arrow")
    if plain and (text_format is None or (text_format == "csv" and suffix not in CSV_SUFFIXES and not key)):
        return "text"
    if text_format is None:
        raise SnaketuneError(
            f"{display_name} is in none of the supported formats: {SUPPORTED_FORMATS}; write it in one of them"
        )
    return text_format


def _text_format(head: bytes, display_name: str, key: str | None) -> Format | None:
    suffix = suffix_of(display_name)
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()][:LINES_CHECKED]
    begins_json = [bool(JSON_START.match(line)) for line in lines]
    if key:
        if suffix in JSON_SUFFIXES and any(begins_json[:1]):
            raise SnaketuneError(
                f"{display_name}: `{key}` is for CSV files, and this is JSON; make it a source without it"
            )
        return "csv"
    if suffix in JSON_SUFFIXES:
        return "csv" if not any(begins_json) and csv_delimiter(head, display_name) else "json"
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


def advice(data: bytes) -> str:
    """Return what to do about text that isn't UTF-8.

    >>> advice("schön".encode("latin-1"))
    'write the file in UTF-8; if it is in Windows-1252: `iconv -f CP1252 -t UTF-8`'
    """
    if not data.decode("utf-8", "ignore").isascii():
        return "other text in it is; fix it, or fetch the file again"
    return "write the file in UTF-8; if it is in Windows-1252: `iconv -f CP1252 -t UTF-8`"
