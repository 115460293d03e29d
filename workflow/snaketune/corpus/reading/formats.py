"""What a file is, told by its first bytes; its name decides only where they leave it open."""

import csv
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import BinaryIO, Literal

from snaketune.errors import SnaketuneError

Format = Literal["parquet", "arrow", "json", "csv", "text"]
# Opens a file, unpacked, at its beginning, as often as it is called.
Opening = Callable[[], BinaryIO]

HEAD_LENGTH = 64 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
TABLES: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
READ_HERE = "JSON, JSON lines, CSV (with a header and a comma), Parquet and Arrow, each also as .gz or .zst"
UTF_8_PLEASE = "is not UTF-8 but UTF-16 or UTF-32; write it again with `iconv -f UTF-16 -t UTF-8`"
NOT_DATA = {
    b"\xff\xfe": UTF_8_PLEASE,
    b"\xfe\xff": UTF_8_PLEASE,
    b"PK\x03\x04": "is a zip archive; unpack it, and name the files in it",
    b"BZh": "is packed with bzip2; unpack it, or pack it with gzip or zstd",
    b"\xfd7zXZ\x00": "is packed with xz; unpack it, or pack it with gzip or zstd",
    b"version https://git-lfs": "is a Git LFS pointer and not the data; fetch that with `git lfs pull`",
    b"<!doctype html": "is a web page and not the data; fetch the file itself",
    b"<html": "is a web page and not the data; fetch the file itself",
}
# The beginning of an object or an array, of what the first line shows of it.
BEGINS_JSON = re.compile(rb'\s*(\{\s*(["}]|\Z)|\[\s*([\[{"\]]|\Z))')
LINES_LOOKED_AT = 20
ROWS_LOOKED_AT = 5


def format_of(head: bytes, shown: str, *, plain: bool = False) -> Format:
    """The format of a file.

    Args:
        head: its first HEAD_LENGTH bytes, unpacked.
        shown: its name.
        plain: whether a file in no other format is a text; commas then make no CSV unless it is called so.
    Raises:
        SnaketuneError: none that is read here.
    """
    for magic, format_ in TABLES.items():
        if head.startswith(magic):
            return format_
    for magic, what_to_do in NOT_DATA.items():
        if head.lower().startswith(magic.lower()):
            raise SnaketuneError(f"{shown} {what_to_do}")
    if head[1:40:2].count(0) > 10 or head[:40:2].count(0) > 10:
        raise SnaketuneError(f"{shown} {UTF_8_PLEASE}, or fetch it again if it is no text")
    suffix = _suffix(shown)
    if suffix in (".parquet", ".arrow"):
        # Damaged, or an Arrow stream as it was once written: its reader knows, unless this is plainly text.
        return _text_format(head, suffix) or ("parquet" if suffix == ".parquet" else "arrow")
    found = _text_format(head, suffix)
    if plain and (found is None or (found == "csv" and suffix != ".csv")):
        return "text"
    if found is None:
        raise SnaketuneError(f"{shown} is none of the formats that are read here: {READ_HERE}")
    return found


def _text_format(head: bytes, suffix: str) -> Format | None:
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).splitlines() if line.strip()][:LINES_LOOKED_AT]
    begins_json = [bool(BEGINS_JSON.match(line)) for line in lines]
    if suffix in (".json", ".jsonl", ".ndjson"):
        return "csv" if not any(begins_json) and _is_csv(head) else "json"
    if any(begins_json[:1]):
        return "json"
    return "csv" if suffix == ".csv" or _is_csv(head) else None


def _is_csv(head: bytes) -> bool:
    """Whether several rows have as many cells as the header, and more than one."""
    whole = head if len(head) < HEAD_LENGTH else head[: head.rfind(b"\n") + 1]
    rows: list[list[str]] = []
    try:
        for cells in csv.reader(whole.decode("utf-8-sig", "replace").splitlines(keepends=True), strict=True):
            if cells:
                rows.append(cells)
            if len(rows) == ROWS_LOOKED_AT:
                break
    except csv.Error:
        pass
    return len(rows) > 1 and len(rows[0]) > 1 and len({len(cells) for cells in rows}) == 1


def _suffix(shown: str) -> str:
    name = PurePath(shown.lower())
    return PurePath(name.stem).suffix if name.suffix in (".gz", ".zst") else name.suffix
