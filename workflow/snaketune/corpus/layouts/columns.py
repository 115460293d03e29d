"""The columns of a row: which there are, which are read, and what a cell says."""

import math
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.rows import Malformed


class Columns(dict[str, Any]):
    """A row that notes which columns are read: by subscript. `get` and `in` only look.

    Attributes:
        read: names of columns, in order, as often as they were read.
    """

    __slots__ = ("read",)

    def __init__(self, raw: dict[str, Any], read: list[str] | None = None):
        dict.__init__(self, raw)
        self.read: list[str] = [] if read is None else read

    def __getitem__(self, column: str) -> Any:
        self.read.append(column)
        return dict.__getitem__(self, column)


def column_of(raw: dict[str, Any], column: str) -> Any:
    """The value of a column; Malformed if there is none."""
    if column not in raw:
        raise Malformed("missing_column", f"no column {column}, or it is null; {columns_of(raw)}")
    return raw[column]


def columns_of(raw: dict[str, Any]) -> str:
    """The columns of a row that aren't null, for messages."""
    columns = [column for column, value in raw.items() if value is not None]
    return f"the row has {', '.join(columns)}"[:EXCERPT_LENGTH] if columns else "the row has no column that isn't null"


def plain_text(value: Any) -> str | None:
    """A text as it is, a number or truth value as one would write it down; None for anything else.

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
