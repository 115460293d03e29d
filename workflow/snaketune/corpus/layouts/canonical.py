"""The raw rows of one file to canonical rows: recognised, read, repaired where the config says so, and checked.

Takes some microseconds per row; flat trees and unpaired completions are held in memory, one file at a time.
"""

from collections.abc import Iterable, Iterator

from snaketune.config.corpus_sources import Frame, Source
from snaketune.corpus.layouts import mapped
from snaketune.corpus.layouts.content import unmark_reasoning
from snaketune.corpus.layouts.exchanges import prompt_and_response
from snaketune.corpus.layouts.frames import strip_frame
from snaketune.corpus.layouts.message_trees import is_nested_tree, rows_of_flat_tree
from snaketune.corpus.layouts.messages import weigh
from snaketune.corpus.layouts.readers import RowFile, rows_of
from snaketune.corpus.layouts.recognise import check_kind, recognise
from snaketune.corpus.layouts.templates import strip_templates
from snaketune.corpus.layouts.tools import variables_of
from snaketune.corpus.layouts.unpaired import pair_up, unpaired_row
from snaketune.corpus.layouts.unread import bad_row_marks, unread_names
from snaketune.corpus.layouts.validation import check, drop_empty_system_turn, refuse_media, repair_row, repairs_for
from snaketune.corpus.layouts.values import Columns, Raw, column_of, wrong_type
from snaketune.corpus.layouts.votes import check_numeric_verdicts, numeric_verdicts
from snaketune.corpus.reading.row_filter import RowFilter
from snaketune.corpus.reading.text_files import chunk_end
from snaketune.corpus.rows import TEXT, Conversation, Dropped, Malformed, Outcome, RawRow, Row, RowResult, Unpaired

# Texts that programs write for a missing value. They may be meant, and are counted.
MISSING = {"nan", "NaN", "None", "NULL", "null", "<NA>"}


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
        yield from _documents(raws, source.fields.text or TEXT, row_filter)
        return
    fields = source.fields
    file = RowFile(kind, source, repair)
    renames = bool(fields.messages or fields.context or fields.reasoning)
    messages: list[tuple[RawRow, Columns]] = []
    completions: list[tuple[RawRow, Columns, Unpaired | Malformed, str]] = []
    verdicts: set[tuple[str, int]] = set()
    for raw in raws:
        value, layout = raw.value, source.layout
        try:
            if isinstance(value, Malformed | Dropped):
                raise value
            row_filter.check(value)
            if fields.prompt or fields.conversation:
                layout, present = "fields", Columns(value)
                check_kind(mapped.kind_of_fields(fields), kind, value)
                if fields.conversation:
                    messages.append((raw, present))
                    continue
                rows = mapped.map_fields(present, source)
                if fields.label and kind != "unpaired":
                    completions.append((raw, present, rows[0], repr(rows[0].tools)))
                    continue
            else:
                present = _present(mapped.rename_columns(value, fields) if renames else value)
                if fields.messages and layout == "auto" and kind == "conversations":
                    layout = "messages"
                if layout == "auto":
                    layout = recognise(present, file)
                check_kind(layout, kind, present)
                refuse_media(present)
                # Recognition accesses columns without using them: only the reader decides which are read.
                present.read.clear()
                if layout == "unpaired" and kind != "unpaired":
                    completions.append((raw, present, *_completion(raw, present, file)))
                    continue
                if layout == "message-tree" and not is_nested_tree(present):
                    messages.append((raw, present))
                    continue
                if layout == "votes":
                    verdicts |= numeric_verdicts(present)
                rows = rows_of(layout, present, file)
        except (Malformed, Dropped) as error:
            yield RowResult(raw, layout, error)
            continue
        for number, row in enumerate(rows):
            yield _result(raw, present, layout, row, file, first=number == 0)
    row_filter.finish()
    check_numeric_verdicts(verdicts)
    for (raw, present, _, _), row in zip(completions, pair_up([read for _, _, *read in completions])):
        yield _result(raw, present, "fields" if fields.label else "unpaired", row, file)
    if fields.conversation:
        rows = mapped.joined_messages([(raw.number, present) for raw, present in messages], source)
    else:
        rows = rows_of_flat_tree([dict(one) for _, one in messages], kind, file.speakers)
    for (raw, present), row in zip(messages, rows):
        yield _result(raw, present, "fields" if fields.conversation else "message-tree", row, file)


def _result(
    raw: RawRow, present: Columns, layout: str, row: Outcome, file: RowFile, *, first: bool = True
) -> RowResult:
    """Return the result for a row: labelled, repaired and checked, if it is one; with unread columns if it is the first."""
    if isinstance(row, Exception):
        return RowResult(raw, layout, row)
    if row is not None:
        try:
            strip_templates(row)
            unmark_reasoning(row)
            if isinstance(file.source.frame, Frame):
                strip_frame(row, file.source.frame)
            drop_empty_system_turn(row)
            if layout != "fields":
                _add_labels(raw, present, layout, row, file)
            _add_settings(raw, row, file.source)
            if file.repair:
                repair_row(row, file.repair)
            try:
                check(row)
            except Malformed as error:
                error.repairs = repairs_for(row)
                raise
            if any(len(turn["content"]) < 5 and turn["content"] in MISSING for turn in row.turns):
                row.notes += ("missing_as_text",)
        except Malformed as error:
            return RowResult(raw, layout, error)
    ignored = unread_names(present, layout, file.mapped_names) if first else ()
    return RowResult(raw, layout, row, ignored, bad_row_marks(present, ignored) if ignored else ())


def _add_settings(raw: RawRow, row: Row, source: Source) -> None:
    """Set the template variables of a row, and weigh its turns."""
    fields = source.fields
    if fields.weight:
        weigh(row, mapped.column_at(raw.value, fields.weight), fields.weight)
    if source.template_variables or fields.template_variables:
        column = fields.template_variables
        value = mapped.column_at(raw.value, column) if column else None
        row.template_variables = variables_of(value, column or "template_variables", source.template_variables)


def _add_labels(raw: RawRow, present: Columns, layout: str, row: Row, file: RowFile) -> None:
    if file.maps_labels or not mapped.LABELS.isdisjoint(present):
        columns = prompt_and_response(tuple(present)) if layout == "prompt-response" else None
        skip_answer = columns is not None and columns[1] == "answer"
        mapped.add_row_labels(_with_nulls(raw, present, file), row, file.source.fields, skip_answer=skip_answer)


def _with_nulls(raw: RawRow, present: Columns, file: RowFile) -> Columns:
    """Return a row with its null columns, if `fields` name labels: such a column may be null, but must exist."""
    return Columns(raw.value, present.read) if file.maps_labels else present


def _present(row: Raw) -> Columns:
    """Return the columns that aren't null, including those in an `input` that holds messages."""
    inner = row.get("input")
    if type(inner) is dict and "messages" in inner and inner.keys().isdisjoint(row):
        row = {column: value for column, value in row.items() if column != "input"} | inner
    if None in row.values():
        row = {column: value for column, value in row.items() if value is not None}
    return Columns(row)


def _completion(raw: RawRow, present: Columns, file: RowFile) -> tuple[Unpaired | Malformed, str]:
    """Return a completion with its label, and the system text and tools that belong to its prompt, as text."""
    try:
        labels, fields = _with_nulls(raw, present, file), file.source.fields
        context = repr((mapped.system_of(labels, fields), mapped.tools_in_row(labels, fields)))
        return unpaired_row(present, file.speakers), context
    except Malformed as error:
        return error, ""


def _documents(raws: Iterable[RawRow], column: str, row_filter: RowFilter) -> Iterator[RowResult]:
    for raw in raws:
        try:
            if isinstance(raw.value, Malformed | Dropped):
                raise raw.value
            row_filter.check(raw.value)
            text = column_of({name: value for name, value in raw.value.items() if value is not None}, column)
            if not isinstance(text, str):
                raise wrong_type(column, text)
            if not text or text.isspace():
                raise Malformed("empty_document", f"{column} has no text")
        except (Malformed, Dropped) as error:
            yield RowResult(raw, TEXT, error)
            continue
        present = Columns(raw.value)
        ignored = unread_names(present, TEXT, frozenset((column,)))
        marks = bad_row_marks(present, ignored) if ignored else ()
        notes = ("cut_document",) if chunk_end(text) < len(text) else ()
        while text:
            chunk, text = text[: chunk_end(text)], text[chunk_end(text) :]
            # A chunk may be only whitespace.
            if not chunk.isspace():
                row = Conversation(messages=[{"role": TEXT, "content": chunk}], notes=notes)
                yield RowResult(raw, TEXT, row, ignored, marks)
                ignored = marks = ()
    row_filter.finish()
