"""Plain text, for continued pre-training: the column of a table that holds it, long texts cut as files of plain text are."""

from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.corpus.layouts.columns import Columns, column_of
from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.unread_columns import unread
from snaketune.corpus.raw_rows import Made, RawRow
from snaketune.corpus.reading.plain_text import cut_at
from snaketune.corpus.reading.row_filter import Where
from snaketune.corpus.rows import TEXT, Conversation, Dropped, Malformed


def documents(raws: Iterable[RawRow], column: str, where: Where) -> Iterator[Made]:
    """The rows of one file: of each raw row one document, or its pieces."""
    for raw in raws:
        try:
            if isinstance(raw.found, dict):
                where.check(raw.found)
            ignored = unread(Columns(raw.found), TEXT, frozenset((column,))) if isinstance(raw.found, dict) else ()
            for text, notes in _pieces(raw.found, column):
                row = Conversation(messages=[{"role": TEXT, "content": text}], notes=notes)
                yield Made(raw, TEXT, row, ignored)
                ignored = ()
        except (Malformed, Dropped) as why:
            yield Made(raw, TEXT, why)
    where.finish()


def _pieces(found: dict[str, Any] | Malformed, column: str) -> list[tuple[str, tuple[str, ...]]]:
    if isinstance(found, Malformed):
        raise found
    text = column_of({name: value for name, value in found.items() if value is not None}, column)
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(text)}, expected a text")
    if not text or text.isspace():
        raise Malformed("empty_document", f"{column} has no text")
    pieces = []
    while text:
        cut = cut_at(text)
        pieces.append(text[:cut])
        text = text[cut:]
    # What lies between two cuts may be nothing but space.
    return [(piece, ("cut_document",) if len(pieces) > 1 else ()) for piece in pieces if not piece.isspace()]
