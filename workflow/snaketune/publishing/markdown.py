"""Markdown tables, and escaping of untrusted text, which then makes no links, elements, headings or cells."""

import re
import unicodedata
from collections.abc import Iterable

# Characters with a meaning within a line in CommonMark or the Hub's extensions (such as automatic links), to be escaped.
SPECIAL = re.compile(r"([\\`*_\[\]<>&|~#$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
# Bidirectional controls.
BIDI_CONTROLS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def text(value: object) -> str:
    r"""Escape untrusted text as one line of Markdown, for use within a line or in a table cell.

    >>> print(text("a|b <b>*c*</b>\n# [x](javascript:y) http://x www.x"))
    a\|b \<b\>\*c\*\</b\> \# \[x\](javascript:y) http\://x www\.x
    """
    shown = "".join("�" if _unshowable(c) else c for c in str(value))
    return SPECIAL.sub(r"\\\1", " ".join(shown.split()))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table from cells that are Markdown; empty if there are no rows.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    head = list(head)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""


def _unshowable(c: str) -> bool:
    return bool(BIDI_CONTROLS.match(c)) or (unicodedata.category(c) in ("Cc", "Cs") and not c.isspace())
