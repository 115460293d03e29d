"""A row as it was found in a file, and what became of it."""

from typing import Any, Literal, NamedTuple

from snaketune.corpus.rows import Dropped, Malformed, Row


class RawRow(NamedTuple):
    """A row as it was found, or why there is none, and where: the line of a text file, else the number of the row."""

    unit: Literal["line", "row"]
    number: int
    found: dict[str, Any] | Malformed


class Made(NamedTuple):
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
            return {key: without_nulls(part) for key, part in value.items() if part is not None}
        case list():
            return [without_nulls(part) for part in value]
    return value
