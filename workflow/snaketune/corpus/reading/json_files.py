"""JSON and JSON lines to raw rows.

What a file calls itself is only a hint: a .json with one object per line and a .jsonl with one array are both common.
The first two lines decide. A damaged line costs that line, a damaged array costs the file. Either is read a little at a
time, so that memory doesn't grow with the file.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.raw import RawRow
from snaketune.corpus.reading.formats import BYTE_ORDER_MARK, Opening
from snaketune.corpus.reading.json_arrays import document_rows
from snaketune.corpus.reading.json_values import parse
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

# Of a longer first line, only the beginning is looked at: it may be a whole file.
LONGEST_HEAD = 1 << 20


def read_json(opening: Opening, shown: str) -> Iterator[RawRow]:
    """Rows of one array, of an object that wraps one array, or of one object per line.

    Args:
        opening: opens the file at its beginning, as often as it is called.
        shown: the name of the file in messages.
    Yields:
        Rows, or why there is none. Blank lines are no rows.
    Raises:
        SnaketuneError: neither one JSON document nor lines of JSON.
    """
    head = _head(opening)
    if not head:
        return
    if _is_lines(head, shown):
        yield from _json_lines(opening)
        return
    number = 0
    try:
        with opening() as file:
            for number, row in enumerate(document_rows(file, shown, BYTE_ORDER_MARK), start=1):
                yield RawRow("row", number, row if type(row) is dict else _object(row))
    except Malformed as error:
        if number or not _is_object(head[-1]):
            raise SnaketuneError(
                f"{shown} isn't whole JSON: {error.detail}. It may be cut off; fetch it again"
            ) from None
        # Lines after all, and the first of them is damaged.
        yield from _json_lines(opening)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that aren't blank, each with its number."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line and not line.isspace():
            yield number, line


def _head(opening: Opening) -> list[bytes]:
    """The first two lines that aren't blank, each as far as it is looked at."""
    head: list[bytes] = []
    with opening() as file:
        line = file.readline(LONGEST_HEAD).removeprefix(BYTE_ORDER_MARK)
        while line and len(head) < 2:
            if not line.isspace():
                head.append(line)
            line = file.readline(LONGEST_HEAD)
    return head


def _json_lines(opening: Opening) -> Iterator[RawRow]:
    with opening() as file:
        for number, line in _lines(file):
            try:
                row = parse(line)
            except Malformed as error:
                row = error
            yield RawRow("line", number, row if type(row) is dict else _object(row))


def _is_lines(head: list[bytes], shown: str) -> bool:
    """Whether a file that begins with these lines is one JSON value per line."""
    called_lines = shown.lower().removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson"))
    first = head[0].strip()
    cut = len(head[0]) >= LONGEST_HEAD - len(BYTE_ORDER_MARK) and not head[0].endswith(b"\n")
    if cut and first.startswith((b"{", b"[")):
        return called_lines and first.startswith(b"{")
    try:
        value = parse(first)
    except Malformed:
        # The beginning of a document over several lines, or a damaged line.
        return called_lines and first != b"{" and not first.startswith(b"[")
    return len(head) == 2 or (called_lines and isinstance(value, dict))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse(line), dict)
    except Malformed:
        return False


def _object(value: Any) -> dict[str, Any] | Malformed:
    if isinstance(value, (dict, Malformed)):
        return value
    kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
    return Malformed("not_an_object", f"found {kind}", excerpt(value))
