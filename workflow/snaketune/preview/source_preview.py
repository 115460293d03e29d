"""The preview of a source: its rows, what is wrong with them, and lines for a config.

A file that isn't in a config is read by the kind and layout that read most of its rows, or by `fields` suggested by its
columns; a source of a config is read as the config says.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from snaketune.config.corpus_sources import CorpusContent, Fields, Source
from snaketune.corpus.layouts.readers import LAYOUTS
from snaketune.corpus.layouts.recognise import nearest
from snaketune.corpus.reading.sources import hub_name
from snaketune.corpus.rows import TEXT
from snaketune.preview.config_entry import entry
from snaketune.preview.reading import UNKNOWN_LAYOUT, Reading, best_reading, read_as, read_further, repairs_that_help
from snaketune.preview.rendered_rows import BYTES_PER_TOKEN, LENGTHS, RenderedRows, Renderer, render
from snaketune.preview.sample import FORMATS, FileSample, encoding_of, samples_of
from snaketune.preview.suggested_fields import suggested


@dataclass(frozen=True, kw_only=True)
class SourcePreview:
    """The preview of one source.

    Attributes:
        name: the file, or the corpus and its source.
        why: the reason for the kind.
        nearest: if no layout is recognised, the nearest one and what it lacks.
        columns: if no layout is recognised, the columns, each with a value.
        further: rows from the rest of the file, read like the first ones.
        repairs: by repair that helps, the number of rows that it changes.
        repaired: number of rows that could be used in addition with these.
        rendered: its rows rendered by the template; None if there are none.
        entry: lines for a config; "" if the source is in one, or can't be read at all.
        configured: whether the source is in a config.
        lengths: row lengths that the rows are compared with.
    """

    name: str
    samples: list[FileSample]
    reading: Reading
    why: str
    nearest: str = ""
    columns: dict[str, object] = field(default_factory=dict)
    further: Reading | None = None
    repairs: dict[str, int] = field(default_factory=dict)
    repaired: int = 0
    rendered: RenderedRows | None = None
    entry: str = ""
    configured: bool = False
    lengths: tuple[int, ...] = LENGTHS

    @property
    def rows_read(self) -> int:
        """Number of raw rows read."""
        return sum(len(sample.raws) for sample in self.samples)

    @property
    def estimated(self) -> str:
        """How tokens are estimated, and what would count them; "" if they are counted."""
        if not self.rendered or self.rendered.exact:
            return ""
        counted = "until the tokenizer is made" if self.configured else "--tokenizer FOLDER counts them"
        return f"estimated: UTF-8 bytes / {BYTES_PER_TOKEN}; {counted}"

    @property
    def trouble(self) -> list[str]:
        """Errors about its files."""
        return [sample.trouble for sample in self.samples if sample.trouble] + self.reading.trouble


def preview_file(file: str, renderer: Renderer) -> SourcePreview:
    """Preview a file that isn't in a config."""
    source = Source(files=(file,), encoding=encoding_of(Path(file)))
    samples = samples_of(source, None)
    rows_read = sum(len(sample.raws) for sample in samples)
    reading, counts = best_reading(source, samples)
    if samples and not reading.used and samples[0].format.startswith(FORMATS["csv"]):
        # Perhaps prose with commas: in a corpus of kind text, only a .csv is a table.
        as_document = samples_of(source, TEXT)
        if as_document[0].raws and as_document[0].format.startswith(FORMATS[TEXT]):
            samples, rows_read = as_document, len(as_document[0].raws)
            reading, counts = best_reading(source, samples)
    near, columns = _nearest(samples) if 2 * reading.quarantined[UNKNOWN_LAYOUT] > rows_read else ("", {})
    if columns and (suggestion := suggested(samples)):
        kind, fields = suggestion
        mapped = source.model_copy(update={"fields": fields})
        by_fields = read_as(kind, mapped, samples)
        if by_fields.used > reading.used:
            reading, source = by_fields, mapped
    repairs, repaired = repairs_that_help(reading, source, samples)
    return SourcePreview(
        name=file,
        samples=samples,
        reading=reading,
        why=_why(reading, counts, rows_read, by_fields=source.fields != Fields()),
        nearest=near,
        columns=columns,
        further=read_further(reading, source, samples),
        repairs=repairs,
        repaired=repaired,
        rendered=render(renderer, reading.kind, reading.rows) if reading.rows else None,
        entry=entry(file, source, reading, rows_read, repairs, repaired) if reading.used else "",
    )


def preview_source(
    corpus: str, number: int, content: CorpusContent, renderer: Renderer, train_on: str, lengths: tuple[int, ...]
) -> SourcePreview:
    """Preview a source of a config's corpus, numbered from 1.

    Args:
        train_on: where loss is taken in conversations.
        lengths: tokens per row of all packings of the corpus.
    """
    source = content.sources[number - 1]
    samples = samples_of(source, content.kind)
    reading = read_as(content.kind, source, samples, content.repair, content.cleaning)
    rows_read = sum(len(sample.raws) for sample in samples)
    label = f"{corpus}, source {number}" if len(content.sources) > 1 else corpus
    named = hub_name(source.hub) if source.hub else source.files[0]
    more = f" and {len(source.files) - 1} more" if len(source.files) > 1 else ""
    near, columns = _nearest(samples) if 2 * reading.quarantined[UNKNOWN_LAYOUT] > rows_read else ("", {})
    repairs, repaired = repairs_that_help(reading, source, samples)
    return SourcePreview(
        name=f"{label}: {named}{more}",
        samples=samples,
        reading=reading,
        why=f"as the config says; reads {_of(reading.used, rows_read)}",
        nearest=near,
        columns=columns,
        further=read_further(reading, source, samples),
        repairs={name: count for name, count in repairs.items() if name not in content.repair},
        repaired=repaired,
        rendered=render(renderer, reading.kind, reading.rows, train_on) if reading.rows else None,
        configured=True,
        lengths=lengths or LENGTHS,
    )


def _why(reading: Reading, counts: dict[str, int], rows_read: int, *, by_fields: bool) -> str:
    """Return the reason for the kind, as text."""
    if by_fields:
        return f"reads {_of(reading.used, rows_read)} with the `fields` suggested below; no layout is known"
    others = {kind: count for kind, count in counts.items() if kind not in (reading.kind, TEXT)}
    reads = [f"{kind}: {count:,}" for kind, count in others.items() if count]
    reads_too = ", ".join(reads) if reads else "no other kind reads any" if others else ""
    mixed = reading.quarantined.get("wrong_kind", 0) and reads
    advice = "; a corpus holds one kind, so split the file" if mixed else ""
    return f"reads {_of(reading.used, rows_read)}" + (f" ({reads_too})" if reads_too else "") + advice


def _of(count: int, rows: int) -> str:
    if count == rows:
        return f"all {rows:,} rows" if rows > 1 else "its only row"
    return f"{count:,} of {rows:,} rows"


def _nearest(samples: list[FileSample]) -> tuple[str, dict[str, object]]:
    """Return the nearest layout of any kind, and the most common set of columns, each with a value."""
    rows = [raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict)]
    commonest = Counter(tuple(name for name, value in row.items() if value is not None) for row in rows).most_common(1)
    if not commonest:
        return "", {}
    columns = commonest[0][0]
    values = {column: next(row[column] for row in rows if row.get(column) is not None) for column in columns}
    return nearest(columns, frozenset(LAYOUTS)), values
