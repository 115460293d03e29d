"""Columns of a row: which exist, which are read, and their values as text."""

import math
import re
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.rows import Malformed

BLANK = re.compile(
    r"\s*(?:nan|none|null|n/?a|-+|true|false|[-+]?\d[\d.,]*(?:e[-+]?\d+)?|https?://\S+)?\s*", re.IGNORECASE
)


class Columns(dict[str, Any]):
    """A row that records which columns are read by subscript. `get` and `in` record nothing.

    Attributes:
        read: names of the columns read, in order, repeated if read again.
    """

    __slots__ = ("read",)

    def __init__(self, raw: dict[str, Any], read: list[str] | None = None):
        dict.__init__(self, raw)
        self.read: list[str] = [] if read is None else read

    def __getitem__(self, column: str) -> Any:
        self.read.append(column)
        return dict.__getitem__(self, column)


def text_if_number(value: Any) -> Any:
    """Return a number as text, anything else unchanged.

    >>> text_if_number(3.0), text_if_number(True), text_if_number([3])
    ('3', True, [3])
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain_text(value) if is_number and plain_text(value) is not None else value


def mark_read(raw: dict[str, Any], column: str) -> None:
    """Record that a column accessed by `get` is read."""
    if isinstance(raw, Columns):
        raw.read.append(column)


def is_blank(value: Any) -> bool:
    """Return True if a cell holds no text for a prompt: null, an empty value, a number (also as text), or a link.

    >>> [is_blank(value) for value in (None, 4, "4", " nan", [], [1, 2], "https://a.b", "4 cats", ["a"], {"a": 1})]
    [True, True, True, True, True, True, True, False, False, False]
    """
    if isinstance(value, list):
        return all(item is None or isinstance(item, (bool, int, float)) for item in value)
    if not isinstance(value, str):
        return not value or isinstance(value, (bool, int, float))
    return BLANK.fullmatch(value) is not None


def column_of(raw: dict[str, Any], column: str) -> Any:
    """Return the value of a column. Raises Malformed if there is none."""
    if column not in raw:
        raise Malformed("missing_column", f"no column {column}, or it is null; {columns_of(raw)}")
    return raw[column]


def columns_of(raw: dict[str, Any]) -> str:
    """Describe the columns of a row that aren't null, for messages."""
    columns = [column for column, value in raw.items() if value is not None]
    return f"the row has {', '.join(columns)}"[:EXCERPT_LENGTH] if columns else "the row has no column that isn't null"


def plain_text(value: Any) -> str | None:
    """Return a text unchanged, and a number or boolean as text; None for anything else.

    >>> plain_text(51.0), plain_text(0.25), plain_text(True), plain_text([1])
    ('51', '0.25', 'true', None)
    """
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return str(int(value)) if value.is_integer() and abs(value) < 2**53 else str(value)
        case _:
            return None
