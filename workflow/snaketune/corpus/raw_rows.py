"""A row as it was found in a file, and what became of it."""

from typing import Any, Literal, NamedTuple

from snaketune.corpus.rows import Dropped, Malformed, Row

NAN_AS_NULL = ("nan_as_null",)


class RawRow(NamedTuple):
    """A row as it was found, or why there is none, and where: the line of a text file, else the number of the row.

    `notes` name what was changed on reading; the canonical rows that are made of it have them too.
    """

    unit: Literal["line", "row"]
    number: int
    value: dict[str, Any] | Malformed
    notes: tuple[str, ...] = ()


class Noted(NamedTuple):
    """A value that was changed on reading, and the notes of its row."""

    value: Any
    notes: tuple[str, ...] = NAN_AS_NULL


class RowResult(NamedTuple):
    """What became of a raw row.

    Attributes:
        raw: where it came from. One raw row can make several rows, and is then named with each.
        layout: the name of the layout that it has.
        row: the canonical row; or why there is none; or None if the raw row became part of another (a message of a tree).
        ignored: what of the raw row holds something and isn't read: columns, and keys of turns such as
            `messages[].name`. Of several rows that one raw row makes, the first has them.
        marks: which of the ignored columns mark the row as a bad one, such as `is_correct: false`.
    """

    raw: RawRow
    layout: str
    row: Row | Malformed | Dropped | None
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def without_nulls(value: Any) -> Any:
    """A value of a table without the keys that are null: every struct there has the keys of all of them.

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
    """A value with null for each NaN, which is how pandas spells a missing one; the same object where there is none.

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
    """`row`, or what it is without the NaN in it."""
    cleaned = nan_as_null(row)
    return row if cleaned is row else Noted(cleaned)
