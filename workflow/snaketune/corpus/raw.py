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
    """

    raw: RawRow
    layout: str
    row: Row | Malformed | Dropped | None
    ignored: tuple[str, ...] = ()
