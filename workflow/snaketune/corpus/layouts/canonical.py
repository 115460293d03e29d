"""The rows of one file to canonical ones: each recognised, read, mended where the config asks for it, and checked.

Costs some microseconds per row; flat trees and unpaired completions hold their file in memory.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.columns import Columns
from snaketune.corpus.layouts.exchanges import prompt_and_response
from snaketune.corpus.layouts.mapped import (
    SYSTEM_COLUMNS,
    TOOLS_COLUMNS,
    columns_named,
    mapped,
    renamed,
    system_of,
    take_along,
    tools_beside,
)
from snaketune.corpus.layouts.media import refuse_media
from snaketune.corpus.layouts.message_trees import is_nested_tree, rows_of_messages
from snaketune.corpus.layouts.quality_flags import marks_against
from snaketune.corpus.layouts.readers import rows_of
from snaketune.corpus.layouts.recognise import check_kind, recognise
from snaketune.corpus.layouts.repair import mend
from snaketune.corpus.layouts.strip_templates import unframe
from snaketune.corpus.layouts.text_documents import documents
from snaketune.corpus.layouts.unpaired import Labelled, alone, labelled, paired
from snaketune.corpus.layouts.unread_columns import unread
from snaketune.corpus.layouts.validation import check
from snaketune.corpus.layouts.votes import check_numbers, numbers_of
from snaketune.corpus.raw_rows import Made, RawRow
from snaketune.corpus.reading.row_filter import Where
from snaketune.corpus.rows import TEXT, Dropped, Malformed, Row

LABELS = frozenset((*SYSTEM_COLUMNS, *TOOLS_COLUMNS, "answer", "task"))


def canonical_rows(raws: Iterable[RawRow], *, kind: str, source: Source, repair: tuple[str, ...]) -> Iterator[Made]:
    """What becomes of the rows of one file: of each raw row one thing, or several.

    Args:
        kind: what the corpus holds: conversations, preferences, unpaired completions or text.
        repair: what may be done to rows that aren't sound.
    Yields:
        Rows; what is of no use, and why; None for a raw row that became part of another.
    """
    where = Where(source.where)
    if kind == "text":
        yield from documents(raws, source.fields.text or TEXT, where)
        return
    fields, speakers = source.fields, source.speakers
    named = columns_named(fields)
    renames = bool(fields.messages or fields.context or fields.reasoning)
    labels = bool(fields.system or fields.tools or fields.answer or fields.task)
    dialogues: dict[tuple[str, ...], str] = {}
    messages: list[tuple[RawRow, Columns]] = []
    completions: list[tuple[RawRow, Columns, Labelled | Malformed]] = []
    verdicts: set[tuple[str, int]] = set()

    def whole(raw: RawRow, present: Columns) -> Columns:
        # A column that `fields` name may be null, but must be there.
        return Columns(raw.found, present.read) if labels else present

    def made(raw: RawRow, present: Columns, layout: str, row: Row | Malformed | Dropped | None, first: bool) -> Made:
        if isinstance(row, Exception):
            return Made(raw, layout, row)
        if row is not None:
            try:
                unframe(row)
                if layout != "fields" and (labels or not LABELS.isdisjoint(present)):
                    columns = prompt_and_response(tuple(present)) if layout == "prompt-response" else None
                    answered = columns is not None and columns[1] == "answer"
                    take_along(whole(raw, present), row, fields, but_answer=answered)
                if repair:
                    mend(row, repair)
                check(row)
            except Malformed as error:
                return Made(raw, layout, error)
        ignored = unread(present, layout, named) if first else ()
        return Made(raw, layout, row, ignored, marks_against(present, ignored) if ignored else ())

    for raw in raws:
        found, layout = raw.found, source.layout
        try:
            if isinstance(found, Malformed):
                raise found
            where.check(found)
            rows: Iterable[Row | Malformed | Dropped]
            if fields.prompt:
                layout, present = "fields", Columns(found)
                check_kind("prompt-response" if fields.response else "pairs", kind, found)
                rows = (mapped(present, fields, speakers),)
            else:
                present = _present(renamed(found, fields) if renames else found)
                if fields.messages and layout == "auto" and kind == "conversations":
                    layout = "messages"
                if layout == "auto":
                    layout = recognise(present, speakers, dialogues, kind)
                check_kind(layout, kind, present)
                refuse_media(present)
                if layout == "unpaired" and kind != "unpaired":
                    completions.append((raw, present, _labelled(whole(raw, present), present, source)))
                    continue
                if layout == "message-tree" and not is_nested_tree(present):
                    messages.append((raw, present))
                    continue
                if layout == "votes":
                    verdicts |= numbers_of(present)
                # Looked at, and not read: which columns a layout reads is told by its reader.
                present.read.clear()
                if layout == "unpaired":
                    rows = (alone(_labelled(whole(raw, present), present, source)),)
                else:
                    rows = rows_of(layout, present, kind, source, dialogues)
        except (Malformed, Dropped) as why:
            yield Made(raw, layout, why)
            continue
        for number, row in enumerate(rows):
            yield made(raw, present, layout, row, first=number == 0)
    where.finish()
    check_numbers(verdicts)
    for (raw, present, _), row in zip(completions, paired([read for _, _, read in completions])):
        yield made(raw, present, "unpaired", row, first=True)
    contents = [dict(present) for _, present in messages]
    for (raw, present), row in zip(messages, rows_of_messages(contents, kind, speakers)):
        yield made(raw, present, "message-tree", row, first=True)


def _present(found: dict[str, Any]) -> Columns:
    """The columns that aren't null; those inside of an `input` that holds messages, too."""
    inside = found.get("input")
    if type(inside) is dict and "messages" in inside and inside.keys().isdisjoint(found):
        found = {column: value for column, value in found.items() if column != "input"} | inside
    if None in found.values():
        found = {column: value for column, value in found.items() if value is not None}
    return Columns(found)


def _labelled(raw: Columns, present: Columns, source: Source) -> Labelled | Malformed:
    """A completion with its label, and what of other columns belongs to its prompt."""
    try:
        present.read.clear()
        beside = repr((system_of(raw, source.fields), tools_beside(raw, source.fields)))
        return labelled(present, source.speakers, beside)
    except Malformed as error:
        return error
