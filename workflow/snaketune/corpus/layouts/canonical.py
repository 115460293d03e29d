"""The raw rows of one file to canonical rows: read by the file's layout, repaired where the config says so, and checked.

The layout is decided once, by the first rows. Flat trees, messages in rows of their own and completions that are paired are
held in memory, one file at a time; other rows are read one by one, in some microseconds each.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from snaketune.config.corpus_sources import Frame, Source
from snaketune.corpus.layouts.recognise import recognise
from snaketune.corpus.reading.row_filter import RowFilter
from snaketune.corpus.rows import TEXT, Dropped, Malformed, Outcome, RawRow, Row, RowResult
from snaketune.corpus.values.choices import check_choices
from snaketune.corpus.values.content import unmark_reasoning
from snaketune.corpus.values.frames import strip_frame
from snaketune.corpus.values.labels import KEYS, add_labels
from snaketune.corpus.values.marks import bad_row_marks
from snaketune.corpus.values.row_file import Plan, RowFile, column_at
from snaketune.corpus.values.schema import Clue, Values, columns_in
from snaketune.corpus.values.tools import variables_of
from snaketune.corpus.values.turns import weigh
from snaketune.corpus.values.unread import unread_names
from snaketune.corpus.values.validation import check, drop_empty_system_turn, repair_row, repairs_for
from snaketune.corpus.values.verdicts import check_verdicts

# Rows whose columns decide the layout of a file.
ROWS_COMPARED = 200
# Texts that programs write for a missing value. They may be meant, and are counted.
MISSING = {"nan", "NaN", "None", "NULL", "null", "<NA>"}


class FileChecks:
    """What is checked once all rows of a file have been read, also if several jobs read a range of it each.

    Attributes:
        absent: the conditions of `where` whose column no row has had.
        clues, bound: as in `RowFile`.
    """

    def __init__(self, source: Source):
        self.row_filter = RowFilter(source.where)
        self.clues: set[Clue] = set()
        self.bound: dict[str, Any] = {}

    def finish(self) -> None:
        """Raise Malformed if no row has a column of `where`, or it is ambiguous what numbers mean."""
        self.row_filter.finish()
        check_verdicts(self.clues)
        check_choices(self.clues)

    def state(self) -> dict[str, Any]:
        """What `merge` reads, as plain JSON."""
        bound = {key: [*columns_in(name)] for key, name in self.bound.items()}
        return {"absent": [*self.row_filter.absent], "clues": sorted(map(list, self.clues)), "bound": bound}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the state of another range. Raises Malformed: it reads a value from another column than the ranges before."""
        for key, columns in state["bound"].items():
            if self.bound.setdefault(key, columns) != columns:
                what = f"{key} is read from {', '.join(self.bound[key])}, and in a later part from {', '.join(columns)}"
                raise Malformed("columns_differ", f"{what}; map its columns with `fields`")
        absent = self.row_filter.absent
        self.row_filter.absent = {text: None for text in absent if text in state["absent"]}
        self.clues |= {(column, kind, found) for column, kind, found in state["clues"]}


def layout_of(rows: Iterable[RawRow], kind: str, source: Source) -> RowFile:
    """The file whose first rows these are, as its layout reads it; Malformed as by `recognise`."""
    row_filter = RowFilter(source.where)
    return recognise([raw for raw in rows if _is_used(raw, row_filter)], kind, source)


def canonical_rows(
    raws: Iterable[RawRow],
    *,
    kind: str,
    source: Source,
    repair: tuple[str, ...],
    file: RowFile | None = None,
    checks: FileChecks | None = None,
) -> Iterator[RowResult]:
    """Make the rows of one file canonical: each raw row gives one result or several.

    Args:
        kind: the kind of the corpus: conversations, preferences, unpaired or text.
        repair: the configured repairs of rows that aren't valid.
        file: the file of the rows, where they aren't its first ones.
        checks: takes what is checked at the end of the file, where more of its rows are read elsewhere.
    Yields:
        Canonical rows; reasons why a raw row gives none; None for a raw row that became part of another.
    Raises:
        Malformed: the file as a whole can't be read: its columns don't decide the layout, no row has a column of `where`, or
            it is ambiguous what numbers mean.
    """
    end = checks or FileChecks(source)
    row_filter, raws = end.row_filter, iter(raws)
    first: list[RawRow] = []
    if file is None:
        first = list(islice(raws, ROWS_COMPARED))
        file = layout_of(first, kind, source)
    name, read = file.schema.name, file.schema.read
    joined: list[tuple[RawRow, Values, Plan]] = []
    for raw in chain(first, raws):
        try:
            if isinstance(raw.value, Malformed | Dropped):
                raise raw.value
            if row_filter.conditions:
                row_filter.check(raw.value)
            values, plan = file.values(raw.value)
            if file.joins:
                joined.append((raw, values, plan))
                continue
            row = read(values, file)
        except (Malformed, Dropped) as error:
            yield RowResult(raw, name, error)
            continue
        if type(row) is not list:
            yield _result(raw, values, plan, row, file, repair)
            continue
        for number, part in enumerate(row):
            yield _result(raw, values, plan, part, file, repair, first=number == 0)
    end.clues, end.bound = file.clues, file.bound
    if checks is None:
        end.finish()
    if joined:
        rows = file.schema.join([values for _, values, _ in joined], file)
        for (raw, values, plan), row in zip(joined, rows, strict=True):
            yield _result(raw, values, plan, row, file, repair)


def _is_used(raw: RawRow, row_filter: RowFilter) -> bool:
    try:
        if isinstance(raw.value, dict):
            row_filter.check(raw.value)
            return True
    except (Malformed, Dropped):
        pass
    return False


def _result(
    raw: RawRow,
    values: Values,
    plan: Plan,
    row: Outcome,
    file: RowFile,
    repair: tuple[str, ...],
    *,
    first: bool = True,
) -> RowResult:
    """The result for a row: labelled, repaired and checked, if it is one; with unread columns if it is the first."""
    if isinstance(row, Exception):
        return RowResult(raw, file.schema.name, row)
    if row is not None and file.kind != TEXT:
        try:
            _finish(raw, row, values, file, repair)
        except Malformed as error:
            return RowResult(raw, file.schema.name, error)
    ignored = unread_names(raw.value, plan, opaque=file.schema.opaque) if first else ()
    marks = bad_row_marks(raw.value, plan.marks) if first and plan.marks else ()
    return RowResult(raw, file.schema.name, row, ignored, marks)


def _finish(raw: RawRow, row: Row, values: Values, file: RowFile, repair: tuple[str, ...]) -> None:
    for turn in row.turns:
        if turn["content"][:2] == "<|" and turn["role"] == "assistant":
            unmark_reasoning(row)
            break
    if isinstance(file.source.frame, Frame):
        strip_frame(row, file.source.frame)
    if row.opening and row.opening[0]["role"] == "system":
        drop_empty_system_turn(row)
    if not KEYS.isdisjoint(values):
        add_labels(values, row, file)
    if file.settings:
        _add_settings(raw, row, file.source)
    if repair:
        repair_row(row, repair)
    try:
        check(row)
    except Malformed as error:
        error.repairs = repairs_for(row)
        raise
    for turn in row.turns:
        if len(turn["content"]) < 5 and turn["content"] in MISSING:
            row.notes += ("missing_as_text",)
            break


def _add_settings(raw: RawRow, row: Row, source: Source) -> None:
    """Set the template variables of a row, and weigh its turns."""
    fields = source.fields
    if fields.weight:
        weigh(row, column_at(raw.value, fields.weight), fields.weight)
    if source.template_variables or fields.template_variables:
        column = fields.template_variables
        value = column_at(raw.value, column) if column else None
        row.template_variables = variables_of(value, column or "template_variables", source.template_variables)
