"""Raw rows as read from a file, and the results of making them canonical."""

from typing import Any, Literal, NamedTuple

from snaketune.corpus.rows import Dropped, Malformed, Row

NAN_AS_NULL = ("nan_as_null",)


class RawRow(NamedTuple):
    """A row as read, or the reason why it can't be, with its number: the line of a text file, else the index of the row from 1.

    `notes` name what was changed on reading; canonical rows made of it inherit them.
    """

    unit: Literal["line", "row"]
    number: int
    value: dict[str, Any] | Malformed
    notes: tuple[str, ...] = ()


class Noted(NamedTuple):
    """A value that was changed on reading, with the notes for its row."""

    value: Any
    notes: tuple[str, ...] = NAN_AS_NULL


class RowResult(NamedTuple):
    """The result for one raw row, or one of several.

    Attributes:
        raw: the raw row. One raw row can give several rows, and is then in the result of each.
        layout: the name of its layout.
        row: the canonical row; or the reason why there is none; or None if the raw row became part of another row (a message
            of a tree).
        ignored: columns, and keys of turns such as `messages[].name`, that hold something and aren't read. Of several
            results of one raw row, only the first has them.
        marks: those ignored columns that mark the row as a bad one, such as `is_correct: false`.
    """

    raw: RawRow
    layout: str
    row: Row | Malformed | Dropped | None
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def without_nulls(value: Any) -> Any:
    """Remove the null keys of a value from a table, where every struct has the keys of all structs.

    >>> without_nulls([{"a": 1, "b": None}, {"a": None, "b": {"c": None}}])
    [{'a': 1}, {'b': {}}]
    """
    match value:
        case dict():
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [without_nulls(item) for item in value]
    return value


def nan_as_null(value: Any) -> Any:
    """Replace each NaN, which is how pandas writes a missing value, with null; return the same object if there is none.

    >>> nan_as_null({"a": [float("nan"), 1.5]})
    {'a': [None, 1.5]}
    """
    match value:
        case float():
            return value if value == value else None
        case dict():
            cleaned = {key: nan_as_null(item) for key, item in value.items()}
            return cleaned if any(cleaned[key] is not item for key, item in value.items()) else value
        case list():
            items = [nan_as_null(item) for item in value]
            return items if any(item is not old for item, old in zip(items, value)) else value
    return value


def without_nan(row: Any) -> Any:
    """Return `row`; if it holds a NaN, a Noted with nulls instead."""
    cleaned = nan_as_null(row)
    return row if cleaned is row else Noted(cleaned)
