"""Plain text, for continued pre-training: one column of a table, long texts cut like files of plain text."""

from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.corpus.layouts.columns import Columns, column_of
from snaketune.corpus.layouts.content_parts import kind_of
from snaketune.corpus.layouts.unread_columns import unread_names
from snaketune.corpus.raw_rows import RawRow, RowResult
from snaketune.corpus.reading.plain_text import chunk_end
from snaketune.corpus.reading.row_filter import RowFilter
from snaketune.corpus.rows import TEXT, Conversation, Dropped, Malformed


def documents(raws: Iterable[RawRow], column: str, row_filter: RowFilter) -> Iterator[RowResult]:
    """Yield the rows of one file: one document per raw row, or its chunks."""
    for raw in raws:
        try:
            if isinstance(raw.value, dict):
                row_filter.check(raw.value)
            ignored = (
                unread_names(Columns(raw.value), TEXT, frozenset((column,))) if isinstance(raw.value, dict) else ()
            )
            for text, notes in _chunks(raw.value, column):
                row = Conversation(messages=[{"role": TEXT, "content": text}], notes=notes)
                yield RowResult(raw, TEXT, row, ignored)
                ignored = ()
        except (Malformed, Dropped) as error:
            yield RowResult(raw, TEXT, error)
    row_filter.finish()


def _chunks(row: dict[str, Any] | Malformed, column: str) -> list[tuple[str, tuple[str, ...]]]:
    if isinstance(row, Malformed):
        raise row
    text = column_of({name: value for name, value in row.items() if value is not None}, column)
    if not isinstance(text, str):
        raise Malformed("wrong_type", f"{column} holds {kind_of(text)}, expected a text")
    if not text or text.isspace():
        raise Malformed("empty_document", f"{column} has no text")
    chunks = []
    while text:
        cut = chunk_end(text)
        chunks.append(text[:cut])
        text = text[cut:]
    # A chunk may be only whitespace.
    return [(chunk, ("cut_document",) if len(chunks) > 1 else ()) for chunk in chunks if not chunk.isspace()]
