"""JSON and JSON lines to raw rows. The suffix is only a hint: the first two lines decide.

A list of messages is a row with `messages`, and objects that follow each other without a comma are rows. A malformed line is
one malformed row, a malformed array fails the file. Both are read in blocks, so that memory doesn't grow with the file.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, Literal, Protocol

from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.reading.encodings import UTF_8, wrong_encoding
from snaketune.corpus.reading.formats import BYTE_ORDER_MARK, DEFAULT_KEYS, Opener, TextKeys, suffix_of
from snaketune.corpus.reading.json_documents import document_rows
from snaketune.corpus.reading.json_values import parse
from snaketune.corpus.rows import NAN_AS_NULL, Malformed, RawRow, nan_as_null
from snaketune.errors import SnaketuneError

# Only so much of a longer first line is read: it may be a whole file.
MAX_HEAD = 1 << 20
TREE_KEYS = {"message_id", "parent_id"}
# Keys by which messages of several conversations are told apart: each message is a row.
CONVERSATION_ID = re.compile(
    r"(conversation|conv|dialog|dialogue|thread|session|chat|ticket|group)_?(id|uuid|hash)?",
    re.IGNORECASE,
)
KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def read_json(opener: Opener, display_name: str, keys: TextKeys = DEFAULT_KEYS) -> Iterator[RawRow]:
    """Read the rows of one array, of an object that wraps one array, or of one object per line.

    Args:
        keys: its encoding, for messages.
    Yields:
        Rows, or why one can't be read. Blank lines are skipped.
    Raises:
        SnaketuneError: neither one JSON document nor lines of JSON.
    """
    head = _head(opener)
    if not head:
        return
    if _is_lines(head, display_name):
        yield from json_lines(opener)
        return
    number = 0
    try:
        for number, row in enumerate(document_rows(opener, display_name), start=1):
            yield _row("row", number, row)
    except Malformed as error:
        if number or not isinstance(_parsed(head[-1]), dict):
            cut_off = ". It may be cut off; fetch it again" if error.reason == "not_json" else ""
            what = f"{error.detail}{cut_off}"
            if error.reason == "not_utf8":
                what = error.detail if keys.encoding == UTF_8 else wrong_encoding(keys.encoding)
            raise SnaketuneError(f"{display_name} isn't valid JSON: {what}") from None
        # JSON lines after all, and the first line is malformed.
        yield from json_lines(opener)


def rows_of_line(number: int, line: bytes) -> Iterable[RawRow]:
    """Return the row of a line; or the objects of a line that isn't valid JSON because it holds several."""
    value = _parsed(line)
    if type(value) is dict and b"NaN" not in line:
        return [RawRow("line", number, value)]
    if isinstance(value, Malformed) and value.reason == "not_json" and line.lstrip().startswith(b"{"):
        with suppress(Malformed):
            return [_row("line", number, row) for row in document_rows(partial(io.BytesIO, line), "")]
    return [_row("line", number, value)]


class Span(Protocol):
    """A span of a file's bytes, which begins at `start`."""

    start: int

    def lines(self, file: BinaryIO) -> Iterable[bytes]: ...


def is_json_lines(opener: Opener, display_name: str) -> bool:
    """Whether the first two lines show that the file has one value per line."""
    head = _head(opener)
    return bool(head) and _is_lines(head, display_name)


def json_lines(opener: Opener, span: Span | None = None) -> Iterator[RawRow]:
    """Yield the rows of all lines, or of those of a span of bytes, numbered from 1."""
    with opener() as file:
        for number, line in enumerate(span.lines(file) if span else file, start=1):
            if number == 1 and not (span and span.start):
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                yield from rows_of_line(number, line)


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
    if isinstance(value, Malformed) and value.reason == "duplicate_key" and first.startswith(b"{"):
        # A line with a whole object, unless json can't read it either.
        with suppress(ValueError, RecursionError):
            value = json.loads(first)
    if isinstance(value, Malformed):
        # The beginning of a document over several lines, or a malformed line.
        return named_lines and first != b"{" and not first.startswith(b"[")
    one_conversation = _is_messages(value) and not _are_of_several(value)
    return len(head) == 2 or one_conversation or (named_lines and isinstance(value, dict))


def _parsed(line: bytes) -> Any:
    try:
        return parse(line)
    except Malformed as error:
        return error


def _is_messages(value: Any) -> bool:
    """Return True if a value is a list of messages; flat messages of a tree aren't one, because each of them is a row."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return False
    return all(("role" in item or "from" in item) and TREE_KEYS.isdisjoint(item) for item in value)


def _are_of_several(messages: list[dict[str, Any]]) -> bool:
    """Return True if ids of conversations, which some messages share, tell messages apart."""
    ids = ([repr(message.get(key)) for message in messages] for key in messages[0] if CONVERSATION_ID.fullmatch(key))
    return any(1 < len(set(of_key)) < len(of_key) for of_key in ids)


def _row(unit: Literal["line", "row"], number: int, value: Any) -> RawRow:
    try:
        cleaned = nan_as_null(value)
    except RecursionError:
        cleaned = value = Malformed("not_json", "nested too deeply", excerpt(value))
    notes = () if cleaned is value else NAN_AS_NULL
    if _is_messages(cleaned):
        cleaned = {"messages": cleaned}
    if not isinstance(cleaned, (dict, Malformed)):
        kind = KINDS.get(type(cleaned), "a number")
        cleaned = Malformed("not_an_object", f"expected an object, found {kind}", excerpt(cleaned))
    return RawRow(unit, number, cleaned, notes)
