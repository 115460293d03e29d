"""A row as it was found in a file."""

from typing import Any, Literal, NamedTuple

from snaketune.corpus.rows import Malformed


class RawRow(NamedTuple):
    """A row as it was found, or why there is none, and where: the line of a text file, else the number of the row."""

    unit: Literal["line", "row"]
    number: int
    found: dict[str, Any] | Malformed
