"""The layout of a file, decided once from the columns of its first rows.

A layout is a candidate if the file has the columns that it needs. The one that leaves fewest columns is the file's, if the
columns that it leaves are also left by all others; of several, the only one whose rest can't be turns (`unstated`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from snaketune.config.corpus_sources import Source
from snaketune.config.row_fields import MAPPINGS
from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.layouts.nearest import entry_of_fields, nearest
from snaketune.corpus.layouts.table import LAYOUTS
from snaketune.corpus.layouts.unstated import UnstatedColumns
from snaketune.corpus.rows import TEXT, Malformed, RawRow, RowResult
from snaketune.corpus.values.cells import Raw, flat
from snaketune.corpus.values.frames import frame_of_whole
from snaketune.corpus.values.row_file import RowFile, maps_rows, stated_names
from snaketune.corpus.values.schema import VALUES_COMPARED, Name, Samples, Schema, Variant, bind, columns_in


class UnknownLayout(Malformed):
    """Raised for a file whose columns don't decide its layout; the message has the entries to paste.

    Attributes:
        layouts: the layouts that could read it, each with the columns that the config would have to ignore.
    """

    def __init__(self, detail: str, layouts: dict[str, list[str]] | None = None):
        super().__init__("unknown_layout", detail)
        self.layouts = layouts or {}


class Candidate(NamedTuple):
    """A layout that could read a file. `left`: the columns that it wouldn't read."""

    schema: Schema
    variant: Variant
    bound: dict[str, Name]
    left: frozenset[str]


def recognise(rows: Sequence[RawRow], kind: str, source: Source) -> RowFile:
    """The file whose first rows these are. Raises Malformed: no layout, several, or one for another kind of corpus."""
    stated, samples = stated_names(source), _samples(rows, source)
    layout = _stated_layout(source, kind)
    if layout:
        schema = LAYOUTS[layout]
        if kind not in schema.kinds:
            what = f"rows of layout {layout} are for kind {schema.kinds[0]}, and the corpus is of kind {kind}"
            raise Malformed("wrong_kind", what)
        found = _candidates([schema], {} if maps_rows(source.fields) else samples, stated, complete=False)
    else:
        schemas = [schema for schema in LAYOUTS.values() if kind in schema.kinds]
        found = _candidates(schemas, samples, stated, complete=bool(samples))
        found = [candidate for candidate in found if not any(other.left < candidate.left for other in found)]
        if len(found) > 1 and samples:
            found = _decided(found, rows, source)
    if not found:
        raise UnknownLayout(_unknown(samples, kind, source))
    schema, variant, bound, _ = found[0]
    return RowFile(kind, source, schema, variant, bound)


def _stated_layout(source: Source, kind: str) -> str | None:
    if kind == TEXT:
        return TEXT
    if source.layout != "auto":
        return source.layout
    keys = {key for key in stated_names(source) if any(key in mapped for mapped in MAPPINGS.values())}
    if source.fields.messages and kind == "conversations":
        return "messages"
    return next((layout for layout, mapped in MAPPINGS.items() if keys == set(mapped)), None)


def _samples(rows: Sequence[RawRow], source: Source) -> Samples:
    samples: dict[str, list] = {}
    for raw in rows:
        row = flat(raw.value) if isinstance(raw.value.get("input"), dict) else raw.value
        for column, value in row.items():
            values = samples.setdefault(column, [])
            if value is not None and len(values) < VALUES_COMPARED:
                values.append(value)
    return {column: values for column, values in samples.items() if column not in source.ignore}


def _candidates(
    schemas: Sequence[Schema], samples: Samples, stated: dict[str, Name], *, complete: bool
) -> list[Candidate]:
    """The layouts that the columns suit. Args: complete: whether all needed columns must be there, else those nearest."""
    found = []
    for schema in schemas:
        for variant in schema.variants:
            keys = {column.key for column in variant.columns}
            if complete and not stated.keys() <= keys:
                continue
            bound = bind(variant, samples, stated)
            if complete and not bound.keys() >= set(variant.needed):
                continue
            read = {column for name in bound.values() for column in columns_in(name)}
            found.append(Candidate(schema, variant, bound, frozenset(samples) - read))
    if not complete:
        found.sort(
            key=lambda candidate: (len(set(candidate.variant.needed) - candidate.bound.keys()), len(candidate.left))
        )
    return found


def _decided(found: list[Candidate], rows: Sequence[RawRow], source: Source) -> list[Candidate]:
    """The only candidate whose rest can't be turns. Raises UnknownLayout if there are none or several."""
    questions = [(candidate, _in_question(candidate, rows, source)) for candidate in found]
    harmless = [candidate for candidate, unstated in questions if not unstated.in_question]
    if len(harmless) == 1:
        return harmless
    questions.sort(key=lambda question: len(question[1].in_question))
    lines = ["the columns don't decide the layout:"]
    for (schema, variant, bound, left), _ in questions[:2]:
        read = ", ".join(", ".join(columns_in(name)) for name in bound.values())
        complete = sum(all(_has(raw.value, bound[key]) for key in variant.needed) for raw in rows)
        lines.append(
            f"  {schema.name} reads {read} ({complete} of the first {len(rows)} rows) and leaves {', '.join(sorted(left))}"
        )
    if any(
        sum(_has(raw.value, name) for raw in rows) < len(rows)
        for candidate in found
        for name in candidate.bound.values()
    ):
        lines.append("If some rows have the columns of one layout and some those of another, split the file.")
    lines.append("The source is then one of:")
    lines += [unstated.entry(candidate.schema.name) for candidate, unstated in questions[:2]]
    raise UnknownLayout(
        "\n".join(lines), {candidate.schema.name: [*unstated.in_question] for candidate, unstated in questions[:2]}
    )


def _has(row: Raw, name: Name) -> bool:
    return all(row.get(column) is not None for column in columns_in(name))


def _in_question(candidate: Candidate, rows: Sequence[RawRow], source: Source) -> UnstatedColumns:
    unstated = UnstatedColumns(source)
    for raw in rows:
        left = tuple(column for column in candidate.left if raw.value.get(column) not in (None, "", [], {}))
        unstated.add(RowResult(raw, candidate.schema.name, None, left))
    unstated.finish()
    return unstated


def _unknown(samples: Samples, kind: str, source: Source) -> str:
    """The message for a file in no layout: its columns, the nearest two, and an entry to complete."""
    columns = ", ".join(samples)[:EXCERPT_LENGTH]
    lines = [f"no layout for kind {kind} reads these columns: {columns}"]
    lines += [f"  nearest: {text}" for text in nearest(tuple(samples), kind)]
    others = [schema for schema in LAYOUTS.values() if kind not in schema.kinds]
    for schema, *_ in _candidates(others, samples, stated_names(source), complete=True)[:1]:
        lines.append(f"  they are {schema.name}, which a corpus of kind {schema.kinds[0]} reads")
    if kind == "conversations":
        for column, values in samples.items():
            if frame := frame_of_whole(value for value in values if isinstance(value, str)):
                whole = {
                    "layout": "dialogue",
                    "fields": {"messages": column},
                    "frame": frame.model_dump(exclude_defaults=True),
                }
                lines.append(
                    f"Nearly all texts of {column} are whole conversations with these marks; the source is then:"
                )
                return "\n".join([*lines, source.entry(**whole)])
    lines += [
        "Map the columns with `fields`; the source is then, for instance:",
        entry_of_fields(tuple(samples), kind, source),
    ]
    return "\n".join(lines)
