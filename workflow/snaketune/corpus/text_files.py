"""JSON, JSON lines and CSV to raw rows.

What a file calls itself is only a hint: a .json with one object per line and a .jsonl with one array are both common.
The first two lines decide. A damaged line costs that line, a damaged array costs the file. JSON lines parse at some
100 MB/s.
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

from snaketune.corpus.rows import EXCERPT_LENGTH, Malformed, excerpt
from snaketune.errors import SnaketuneError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONGEST_CSV_CELL = 2**31 - 1


def read_json(file: BinaryIO, shown: str) -> Iterator[tuple[str, int, Any]]:
    """Rows of one array, of an object that wraps one array, or of one object per line.

    Yields:
        "line" or "row", its number, and the row or why there is none. Blank lines are no rows.
    Raises:
        SnaketuneError: neither one JSON document nor lines of JSON.
    """
    head = [line for _, line in islice(_lines(file), 2)]
    if not head:
        return
    file.seek(0)
    if _is_lines(head, shown):
        yield from _json_lines(file)
        return
    try:
        document = _parse(file.read().removeprefix(BYTE_ORDER_MARK))
    except Malformed as error:
        if not _is_object(head[-1]):
            raise SnaketuneError(
                f"{shown} isn't whole JSON: {error.detail}. It may be cut off; fetch it again"
            ) from None
        # Lines after all, and the first of them is damaged.
        file.seek(0)
        yield from _json_lines(file)
        return
    for number, row in enumerate(_rows_of(document), start=1):
        yield "row", number, row if isinstance(row, dict) else _not_an_object(row)


def read_csv(file: BinaryIO, shown: str) -> Iterator[tuple[str, int, Any]]:
    """Rows of a comma-separated file with a header; cells may span lines.

    Yields:
        "line", the line that the row begins on, and the row or why there is none.
    Raises:
        SnaketuneError: a header with a name twice, or a quote that is never closed.
    """
    csv.field_size_limit(LONGEST_CSV_CELL)
    # Bytes that aren't UTF-8 survive as lone surrogates, so that they cost their row and not the file.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise SnaketuneError(f"{shown}: the header, line 1, is no CSV: {error}; mend its quotes") from None
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SnaketuneError(f"{shown}: the header has the column {twice!r} twice; rename one of them")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                raise SnaketuneError(
                    f"{shown}: the row that begins on line {line} opens a quote that is never closed; "
                    "close it, or fetch the file again if it is cut off"
                ) from None
            yield "line", line, Malformed("not_csv", str(error))
            continue
        if cells:
            yield "line", line, _csv_row(header, cells)


def _csv_row(header: list[str], cells: list[str]) -> dict[str, str] | Malformed:
    found = ",".join(cells)[:EXCERPT_LENGTH]
    if any("\udc80" <= character <= "\udcff" for cell in cells if not cell.isascii() for character in cell):
        return Malformed("not_utf8", "a cell isn't UTF-8", found)
    if len(cells) != len(header):
        return Malformed("wrong_number_of_cells", f"{len(cells)} cells, the header has {len(header)}", found)
    return dict(zip(header, cells))


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that aren't blank, each with its number."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.isspace() and line:
            yield number, line


def _json_lines(file: BinaryIO) -> Iterator[tuple[str, int, Any]]:
    for number, line in _lines(file):
        try:
            row = _parse(line)
        except Malformed as error:
            yield "line", number, error
        else:
            yield "line", number, row if isinstance(row, dict) else _not_an_object(row)


def _is_lines(head: list[bytes], shown: str) -> bool:
    """Whether a file that begins with these lines is one JSON value per line."""
    called_lines = shown.lower().removesuffix(".gz").endswith(".jsonl")
    first = head[0].strip()
    try:
        value = _parse(first)
    except Malformed:
        # The beginning of a document over several lines, or a damaged line.
        return called_lines and first != b"{" and not first.startswith(b"[")
    return len(head) == 2 or (called_lines and isinstance(value, dict))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(_parse(line), dict)
    except Malformed:
        return False


def _rows_of(document: Any) -> list[Any]:
    if isinstance(document, dict):
        arrays = [value for value in document.values() if isinstance(value, list)]
        if len(arrays) == 1 and all(isinstance(item, dict) and not _is_turn(item) for item in arrays[0]):
            return arrays[0]
    return document if isinstance(document, list) else [document]


def _is_turn(item: dict[str, Any]) -> bool:
    return item.keys() >= {"role", "content"} or item.keys() >= {"from", "value"}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _parse(data: bytes) -> Any:
    try:
        return _decode(data.decode())
    except UnicodeDecodeError as error:
        reason, detail = "not_utf8", f"byte {error.start + 1} isn't UTF-8 ({error.reason})"
    except RecursionError:
        reason, detail = "not_json", "nested too deeply"
    except ValueError as error:
        reason, detail = "not_json", str(error)
    raise Malformed(reason, detail, data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH])


def _not_an_object(value: Any) -> Malformed:
    kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
    return Malformed("not_an_object", f"found {kind}", excerpt(value))
