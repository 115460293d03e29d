"""Markdown in which foreign text stays text: no link, no element, no heading and no cell is somebody else's."""

import re
import unicodedata
from collections.abc import Iterable

# What begins anything within a line, in CommonMark or in what the Hub adds to it, addresses that become links among it. A
# backslash takes that from it.
SPECIAL = re.compile(r"([\\`*_\[\]<>&|~#$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
# As the report has them: characters that turn the direction of what follows.
TURNING = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def text(value: object) -> str:
    r"""Foreign text as one line of plain Markdown, to stand after words of ours or in a cell of a table.

    >>> print(text("a|b <b>*c*</b>\n# [x](javascript:y) http://x www.x"))
    a\|b \<b\>\*c\*\</b\> \# \[x\](javascript:y) http\://x www\.x
    """
    shown = "".join("�" if _unshowable(c) else c for c in str(value))
    return SPECIAL.sub(r"\\\1", " ".join(shown.split()))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown; cells are Markdown already. Nothing where there are no rows.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    head = list(head)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""


def _unshowable(c: str) -> bool:
    return bool(TURNING.match(c)) or (unicodedata.category(c) in ("Cc", "Cs") and not c.isspace())
