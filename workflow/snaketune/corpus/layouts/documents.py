"""Plain text, for continued pre-training: a column of a table, or a file that is one document.

A document longer than LONGEST characters is cut into several, so that nothing has to hold a file of a gigabyte at once:
after its last blank line within that length, else after its last line, else its last word. Laid end to end, the pieces are
the document. Each is a row of its own, so the share held out of a single long file is a share of its pieces.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from snaketune.corpus.layouts.mapped import column_of
from snaketune.corpus.layouts.parts import kind_of
from snaketune.corpus.layouts.unread import Columns, unread
from snaketune.corpus.raw import RawRow
from snaketune.corpus.reading.text_files import BYTE_ORDER_MARK
from snaketune.corpus.rows import EXCERPT_LENGTH, TEXT, Conversation, Dropped, Made, Malformed

# As many rows as a batch has, twice over, of four bytes per character, are still less than the 2 GB that Arrow holds in one.
LONGEST = 250_000
# A cut before the middle would make many short pieces of what happens to begin with a heading.
BREAKS = ("\n\n", "\n", " ")


def documents(raws: Iterable[RawRow], column: str) -> Iterator[Made]:
    """The rows of one file: of each raw row one document, or its pieces."""
    for raw in raws:
        try:
            ignored = unread(Columns(raw.found), TEXT, frozenset((column,))) if isinstance(raw.found, dict) else ()
            for text, notes in _pieces(raw.found, column):
                row = Conversation(messages=[{"role": TEXT, "content": text}], notes=notes)
                yield Made(raw, TEXT, row, ignored)
                ignored = ()
        except (Malformed, Dropped) as why:
            yield Made(raw, TEXT, why)


def _pieces(found: dict[str, Any] | Malformed, column: str) -> list[tuple[str, tuple[str, ...]]]:
    if isinstance(found, Malformed):
        raise found
    text = column_of({name: value for name, value in found.items() if value is not None}, column)
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(text)}, expected a text")
    if not text or text.isspace():
        raise Malformed("empty_document", f"{column} has no text")
    pieces = []
    while len(text) > LONGEST:
        cut = cut_at(text)
        pieces.append(text[:cut])
        text = text[cut:]
    pieces.append(text)
    # What lies between two cuts may be nothing but space.
    return [(piece, ("cut_document",) if len(pieces) > 1 else ()) for piece in pieces if not piece.isspace()]


def cut_at(text: str) -> int:
    """How much of a long text its first piece takes.

    >>> cut_at("word " * 60_000)
    250000
    """
    for mark in BREAKS:
        place = text.rfind(mark, LONGEST // 2, LONGEST)
        if place >= 0:
            return place + len(mark)
    return LONGEST


def read_text(opening: Callable[[], BinaryIO], shown: str) -> Iterator[RawRow]:
    """A file that is one document, in pieces where it is long; each with the line that it begins on.

    Args:
        opening: opens the file at its beginning.
        shown: its name, for the log.
    """
    with opening() as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        # Bytes that aren't UTF-8 survive as lone surrogates, so that they cost their piece and not the file.
        with io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
            text, line, pieces = "", 1, 0
            while True:
                more = lines.read(LONGEST + 1 - len(text)) if len(text) <= LONGEST else ""
                text += more
                if not text:
                    break
                cut = cut_at(text) if len(text) > LONGEST else len(text)
                piece, text = text[:cut], text[cut:]
                pieces += 1
                yield RawRow("line", line, _checked(piece))
                line += piece.count("\n")
            if pieces > 1:
                print(f"{shown} is a long document, read in {pieces} pieces", flush=True)


def _checked(piece: str) -> dict[str, Any] | Malformed:
    if not piece.isascii() and any("\udc80" <= character <= "\udcff" for character in piece):
        return Malformed("not_utf8", "the text isn't UTF-8", piece[:EXCERPT_LENGTH])
    return {TEXT: piece}
