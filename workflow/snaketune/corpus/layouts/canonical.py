"""The raw rows of one file to canonical rows: recognised, read, repaired where the config says so, and checked.

Takes some microseconds per row; flat trees and unpaired completions are held in memory, one file at a time.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.columns import Columns
from snaketune.corpus.layouts.exchanges import prompt_and_response
from snaketune.corpus.layouts.mapped import (
    SYSTEM_COLUMNS,
    TOOLS_COLUMNS,
    add_row_labels,
    map_fields,
    mapped_columns,
    rename_columns,
    system_of,
    tools_in_row,
)
from snaketune.corpus.layouts.media import refuse_media
from snaketune.corpus.layouts.message_trees import is_nested_tree, rows_of_flat_tree
from snaketune.corpus.layouts.quality_flags import bad_row_marks
from snaketune.corpus.layouts.readers import rows_of
from snaketune.corpus.layouts.recognise import check_kind, recognise
from snaketune.corpus.layouts.repair import repair_row
from snaketune.corpus.layouts.strip_templates import strip_templates
from snaketune.corpus.layouts.text_documents import documents
from snaketune.corpus.layouts.unpaired import Labelled, pair_up, read_labelled, unpaired_row
from snaketune.corpus.layouts.unread_columns import unread_names
from snaketune.corpus.layouts.validation import check
from snaketune.corpus.layouts.votes import check_numeric_verdicts, numeric_verdicts
from snaketune.corpus.raw_rows import RawRow, RowResult
from snaketune.corpus.reading.row_filter import RowFilter
from snaketune.corpus.rows import TEXT, Dropped, Malformed, Row

LABELS = frozenset((*SYSTEM_COLUMNS, *TOOLS_COLUMNS, "answer", "task"))


def canonical_rows(
    raws: Iterable[RawRow], *, kind: str, source: Source, repair: tuple[str, ...]
) -> Iterator[RowResult]:
    """Make the rows of one file canonical: each raw row gives one result or several.

    Args:
        kind: the kind of the corpus: conversations, preferences, unpaired or text.
        repair: the configured repairs of rows that aren't valid.
    Yields:
        Canonical rows; reasons why a raw row gives none; None for a raw row that became part of another.
    Raises:
        Malformed: the file as a whole doesn't fit the config: no row has a column of `where`, or votes are ambiguous.
    """
    row_filter = RowFilter(source.where)
    if kind == "text":
        yield from documents(raws, source.fields.text or TEXT, row_filter)
        return
    fields, speakers = source.fields, source.speakers
    mapped_names = mapped_columns(fields)
    renames = bool(fields.messages or fields.context or fields.reasoning)
    labels = bool(fields.system or fields.tools or fields.answer or fields.task)
    dialogues: dict[tuple[str, ...], str] = {}
    messages: list[tuple[RawRow, Columns]] = []
    completions: list[tuple[RawRow, Columns, Labelled | Malformed]] = []
    verdicts: set[tuple[str, int]] = set()

    def with_nulls(raw: RawRow, present: Columns) -> Columns:
        # A column that `fields` name may be null, but must exist.
        return Columns(raw.value, present.read) if labels else present

    def result(
        raw: RawRow, present: Columns, layout: str, row: Row | Malformed | Dropped | None, first: bool
    ) -> RowResult:
        if isinstance(row, Exception):
            return RowResult(raw, layout, row)
        if row is not None:
            try:
                strip_templates(row)
                if layout != "fields" and (labels or not LABELS.isdisjoint(present)):
                    columns = prompt_and_response(tuple(present)) if layout == "prompt-response" else None
                    answer_is_response = columns is not None and columns[1] == "answer"
                    add_row_labels(with_nulls(raw, present), row, fields, skip_answer=answer_is_response)
                if repair:
                    repair_row(row, repair)
                check(row)
            except Malformed as error:
                return RowResult(raw, layout, error)
        ignored = unread_names(present, layout, mapped_names) if first else ()
        return RowResult(raw, layout, row, ignored, bad_row_marks(present, ignored) if ignored else ())

    for raw in raws:
        value, layout = raw.value, source.layout
        try:
            if isinstance(value, Malformed):
                raise value
            row_filter.check(value)
            rows: Iterable[Row | Malformed | Dropped]
            if fields.prompt:
                layout, present = "fields", Columns(value)
                check_kind("prompt-response" if fields.response else "pairs", kind, value)
                rows = (map_fields(present, fields, speakers),)
            else:
                present = _present(rename_columns(value, fields) if renames else value)
                if fields.messages and layout == "auto" and kind == "conversations":
                    layout = "messages"
                if layout == "auto":
                    layout = recognise(present, speakers, dialogues, kind)
                check_kind(layout, kind, present)
                refuse_media(present)
                if layout == "unpaired" and kind != "unpaired":
                    completions.append((raw, present, _labelled(with_nulls(raw, present), present, source)))
                    continue
                if layout == "message-tree" and not is_nested_tree(present):
                    messages.append((raw, present))
                    continue
                if layout == "votes":
                    verdicts |= numeric_verdicts(present)
                # Recognition accesses columns without using them: only the reader decides which are read.
                present.read.clear()
                if layout == "unpaired":
                    rows = (unpaired_row(_labelled(with_nulls(raw, present), present, source)),)
                else:
                    rows = rows_of(layout, present, kind, source, dialogues)
        except (Malformed, Dropped) as error:
            yield RowResult(raw, layout, error)
            continue
        for number, row in enumerate(rows):
            yield result(raw, present, layout, row, first=number == 0)
    row_filter.finish()
    check_numeric_verdicts(verdicts)
    for (raw, present, _), row in zip(completions, pair_up([read for _, _, read in completions])):
        yield result(raw, present, "unpaired", row, first=True)
    contents = [dict(present) for _, present in messages]
    for (raw, present), row in zip(messages, rows_of_flat_tree(contents, kind, speakers)):
        yield result(raw, present, "message-tree", row, first=True)


def _present(row: dict[str, Any]) -> Columns:
    """Return the columns that aren't null, including those in an `input` that holds messages."""
    inner = row.get("input")
    if type(inner) is dict and "messages" in inner and inner.keys().isdisjoint(row):
        row = {column: value for column, value in row.items() if column != "input"} | inner
    if None in row.values():
        row = {column: value for column, value in row.items() if value is not None}
    return Columns(row)


def _labelled(raw: Columns, present: Columns, source: Source) -> Labelled | Malformed:
    """Return a completion with its label, and the system text and tools that belong to its prompt."""
    try:
        present.read.clear()
        context = repr((system_of(raw, source.fields), tools_in_row(raw, source.fields)))
        return read_labelled(present, source.speakers, context)
    except Malformed as error:
        return error
