"""Files that are one document each, in pieces where they are long.

A document longer than LONGEST characters is cut into several, so that nothing has to hold a file of a gigabyte at once:
after its last blank line within that length, else after its last line, else its last word. Laid end to end, the pieces are
the document. Each is a row of its own, so the share held out of a single long file is a share of its pieces.
"""

import io
from collections.abc import Iterator
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.raw_rows import RawRow
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.formats import Opening
from snaketune.corpus.rows import TEXT, Malformed

# As many rows as a batch has, twice over, of four bytes per character, are still less than the 2 GB that Arrow holds in one.
LONGEST = 250_000
# A cut before the middle would make many short pieces of what happens to begin with a heading.
BREAKS = ("\n\n", "\n", " ")


def cut_at(text: str) -> int:
    """How much of a text its first piece takes.

    >>> cut_at("word " * 60_000), cut_at("word")
    (250000, 4)
    """
    if len(text) <= LONGEST:
        return len(text)
    for mark in BREAKS:
        place = text.rfind(mark, LONGEST // 2, LONGEST)
        if place >= 0:
            return place + len(mark)
    return LONGEST


def read_text(opening: Opening, shown: str) -> Iterator[RawRow]:
    """A file that is one document, in pieces where it is long; each with the line that it begins on.

    Args:
        opening: opens the file at its beginning.
        shown: its name, for the log.
    """
    # Bytes that aren't UTF-8 survive as lone surrogates, so that they cost their piece and not the file.
    with io.TextIOWrapper(opening(), encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        text, line, pieces = "", 1, 0
        while True:
            more = lines.read(LONGEST + 1 - len(text)) if len(text) <= LONGEST else ""
            text += more
            if not text:
                break
            cut = cut_at(text)
            piece, text = text[:cut], text[cut:]
            pieces += 1
            yield RawRow("line", line, _checked(piece))
            line += piece.count("\n")
        if pieces > 1:
            print(f"{shown} is a long document, read in {pieces} pieces", flush=True)


def _checked(piece: str) -> dict[str, Any] | Malformed:
    if not piece.isascii() and any("\udc80" <= character <= "\udcff" for character in piece):
        why = f"the text isn't UTF-8; {advice(piece.encode(errors='surrogateescape'))}"
        return Malformed("not_utf8", why, piece[:EXCERPT_LENGTH])
    return {TEXT: piece}
