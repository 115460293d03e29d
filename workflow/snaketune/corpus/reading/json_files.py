"""JSON and JSON lines to raw rows. The suffix is only a hint: the first two lines decide.

A malformed line is one malformed row, a malformed document fails the file. Lines are read one by one, a document as a whole: in
memory, it takes about five times its size. The other keys of an object around rows, such as a common context, are columns of
each row.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import orjson

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt
from snaketune.corpus.reading.formats import BYTE_ORDER_MARK, Opener, advice, suffix_of
from snaketune.corpus.rows import NAN_AS_NULL, Malformed, RawRow, nan_as_null
from snaketune.errors import SnaketuneError

# Only so much of a longer first line is read: it may be a whole file. Larger documents aren't held in memory.
MAX_HEAD, MAX_DOCUMENT = 1 << 20, 2 << 30
PYTHON_REPR = re.compile(rb"\s*\[?\s*\{\s*'")
TREE_KEYS = {"message_id", "parent_id"}
# An object with a list in one of these columns is a row; any other object around one list of objects wraps rows.
COLUMNS_OF_LISTS = {"messages", "conversations", "conversation", "turns", "instances", "replies", "chosen", "rejected"}
COLUMNS_OF_LISTS |= {"chosen_messages", "rejected_messages", "prompt", "completion", "trajectory", "context", "history"}
KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
AS_LINES = "write its rows as JSON lines: `jq -c '{}' FILE > rows.jsonl`"


def read_json(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read the rows of one array, of an object that wraps one array, or of one object per line.

    Yields:
        Rows, or why one can't be read. Blank lines are skipped.
    Raises:
        SnaketuneError: neither one JSON document nor lines of JSON.
    """
    head = _head(opener)
    if not head:
        return
    if _is_lines(head, display_name):
        yield from _json_lines(opener)
        return
    try:
        with opener() as file:
            data = file.read(MAX_DOCUMENT).removeprefix(BYTE_ORDER_MARK)
            if file.read(1):
                what = (
                    f"is one JSON document of more than {MAX_DOCUMENT >> 30} GB, which would have to be held in memory"
                )
                raise SnaketuneError(f"{display_name} {what}; {AS_LINES.format('.[]')}")
        document = parse(data)
    except Malformed as error:
        if isinstance(_parsed(head[-1]), dict):
            # JSON lines after all, and the first line is malformed.
            yield from _json_lines(opener)
            return
        what = error.detail
        if "Extra data" in what and head[0].lstrip().startswith(b"{"):
            what += f". If objects follow one another, {AS_LINES.format('.')}"
        elif error.reason == "not_json":
            what += ". It may be cut off; fetch it again"
        raise SnaketuneError(f"{display_name} isn't valid JSON: {what}") from None
    may_be_nan = b"NaN" in data
    del data
    for number, row in enumerate(_rows_of(document, display_name), start=1):
        yield _row("row", number, row, may_be_nan=may_be_nan)


def parse(data: bytes) -> Any:
    """Parse JSON; a bare NaN, which only Python's module reads, is a float. Raises Malformed: not UTF-8 or not JSON."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data.decode(), parse_constant=_constant_of)
    except UnicodeDecodeError as error:
        reason, detail = "not_utf8", f"byte {error.start + 1} isn't UTF-8 ({error.reason}); {advice(data)}"
    except RecursionError:
        reason, detail = "not_json", "nested too deeply"
    except ValueError as error:
        reason, detail = "not_json", str(error)
        if PYTHON_REPR.match(data):
            what = (
                "texts are in single quotes, as Python prints them; write the row with json.dumps, not with str or repr"
            )
            reason, detail = "python_repr", f"{what} ({detail})"
    raise Malformed(reason, detail, data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH])


def _constant_of(literal: str) -> float:
    if literal != "NaN":
        raise ValueError(f"{literal} isn't valid JSON")
    return math.nan


def _parsed(line: bytes) -> Any:
    try:
        return parse(line)
    except Malformed as error:
        return error


def _json_lines(opener: Opener) -> Iterator[RawRow]:
    with opener() as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                value = _parsed(line)
                # Nearly all lines are one object each.
                is_plain = type(value) is dict and b"NaN" not in line
                yield RawRow("line", number, value) if is_plain else _row("line", number, value, may_be_nan=True)


def _head(opener: Opener) -> list[bytes]:
    """Return the first two lines that aren't blank, each cut at MAX_HEAD."""
    head: list[bytes] = []
    with opener() as file:
        line = file.readline(MAX_HEAD).removeprefix(BYTE_ORDER_MARK)
        while line and len(head) < 2:
            if not line.isspace():
                head.append(line)
            line = file.readline(MAX_HEAD)
    return head


def _is_lines(head: list[bytes], display_name: str) -> bool:
    """Return True if a file that begins with these lines has one JSON value per line."""
    named_lines = suffix_of(display_name) in (".jsonl", ".ndjson")
    first = head[0].strip()
    cut = len(head[0]) >= MAX_HEAD - len(BYTE_ORDER_MARK) and not head[0].endswith(b"\n")
    if cut and first.startswith((b"{", b"[")):
        return named_lines and first.startswith(b"{")
    value = _parsed(first)
    if isinstance(value, Malformed):
        # The beginning of a document over several lines, or a malformed line.
        return named_lines and first != b"{" and not first.startswith(b"[")
    return len(head) == 2 or _is_messages(value) or (named_lines and isinstance(value, dict))


def _is_messages(value: Any) -> bool:
    """Return True if a value is a list of messages; flat messages of a tree aren't one, because each of them is a row."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return False
    return all(("role" in item or "from" in item) and TREE_KEYS.isdisjoint(item) for item in value)


def _rows_of(document: Any, display_name: str) -> list[Any]:
    """Return the rows of a document: the elements of an array, alone or in an object, or the value itself."""
    if not isinstance(document, dict):
        return document if isinstance(document, list) else [document]
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    hold_rows = all(isinstance(item, dict) for rows in lists.values() for item in rows)
    if not lists or not hold_rows or not COLUMNS_OF_LISTS.isdisjoint(lists):
        return [document]
    if len(lists) > 1:
        name = next(iter(lists))
        raise SnaketuneError(
            f"{display_name} holds several arrays ({', '.join(lists)[:200]}); {AS_LINES.format(f'.{name}[]')}"
        )
    ((name, rows),) = lists.items()
    around = {key: value for key, value in document.items() if key != name and value not in ("", None, {}, [])}
    # Where rows have a column of that name, the other is `NAME (around the rows)`.
    return [{f"{key} (around the rows)" if key in row else key: around[key] for key in around} | row for row in rows]


def _row(unit: Literal["line", "row"], number: int, value: Any, *, may_be_nan: bool) -> RawRow:
    if _is_messages(value):
        value = {"messages": value}
    if isinstance(value, dict):
        cleaned = nan_as_null(value) if may_be_nan else value
        return RawRow(unit, number, cleaned, () if cleaned is value else NAN_AS_NULL)
    if not isinstance(value, Malformed):
        kind = KINDS.get(type(value), "a number")
        value = Malformed("not_an_object", f"expected an object, found {kind}", excerpt(value))
    return RawRow(unit, number, value)
