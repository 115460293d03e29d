"""The preview of a source: its rows, what is wrong with them, and lines for a config.

A file that isn't in a config is read by the kind and layout that read most of its rows, or by `fields` suggested by its
columns; a source of a config is read as the config says.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from snaketune.config.corpus_sources import Source
from snaketune.config.invalid_values import lines_of
from snaketune.config.row_fields import Fields
from snaketune.config.secrets import find_secret
from snaketune.corpus.reading.sources import hub_name
from snaketune.corpus.rows import TEXT
from snaketune.errors import SnaketuneError
from snaketune.locations import located
from snaketune.preview.config_corpora import PreviewedCorpus
from snaketune.preview.config_entry import entry, suggested
from snaketune.preview.reading import Reading, best_reading, read_as, read_further, repairs_that_help
from snaketune.preview.rendered_rows import BYTES_PER_TOKEN, LENGTHS, RenderedRows, Renderer, load_renderer, render
from snaketune.preview.sample import FORMATS, FileSample, encoding_of, samples_of


@dataclass(frozen=True, kw_only=True)
class SourcePreview:
    """The preview of one source.

    Attributes:
        name: the file, or the corpus and its source.
        why: the reason for the kind.
        columns: if they don't decide the layout, the columns, each with a value.
        undecided: why they don't.
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
    columns: dict[str, object] = field(default_factory=dict)
    undecided: str = ""
    further: Reading | None = None
    repairs: dict[str, int] = field(default_factory=dict)
    repaired: int = 0
    rendered: RenderedRows | None = None
    entry: str = ""
    configured: bool = False
    lengths: tuple[int, ...] = LENGTHS

    @property
    def rows_read(self) -> int:
        return _count(self.samples)

    @property
    def estimated(self) -> str:
        """How tokens are estimated, and what would count them; "" if they are counted."""
        if not self.rendered or self.rendered.exact:
            return ""
        counted = "until the tokenizer is made" if self.configured else "--tokenizer FOLDER counts them"
        return f"estimated: UTF-8 bytes / {BYTES_PER_TOKEN}; {counted}"

    @property
    def trouble(self) -> list[str]:
        return [sample.trouble for sample in self.samples if sample.trouble] + self.reading.trouble


def preview_file(file: str, renderer: Renderer) -> SourcePreview:
    if find_secret([file]):
        raise SnaketuneError(
            "a URL with a password, a token or a signature isn't read; credentials come from the environment"
        )
    try:
        source = Source(files=(file,))
        source = Source(files=source.files, encoding=encoding_of(located(file)))
    except ValidationError as error:
        raise SnaketuneError("\n".join(lines_of(error))) from None
    samples = samples_of(source, None)
    reading, counts = best_reading(source, samples)
    if samples and not reading.used and samples[0].format.startswith(FORMATS["csv"]):
        # Perhaps prose with commas: in a corpus of kind text, only a .csv is a table.
        as_document = samples_of(source, TEXT)
        if as_document[0].raws and as_document[0].format.startswith(FORMATS[TEXT]):
            samples = as_document
            reading, counts = best_reading(source, samples)
    columns, undecided = _unknown_columns(reading, samples), reading.unknown.detail if reading.unknown else ""
    if reading.unknown and reading.unknown.layouts:
        layout, ignored = next(iter(reading.unknown.layouts.items()))
        source = source.model_copy(update={"layout": layout, "ignore": tuple(ignored)})
        reading = read_as(reading.kind, source, samples)
    elif columns and (suggestion := suggested(_objects(samples))):
        kind, fields = suggestion
        mapped = source.model_copy(update={"fields": fields})
        by_fields = read_as(kind, mapped, samples)
        if by_fields.used > reading.used:
            reading, source = by_fields, mapped
    repairs, repaired = repairs_that_help(reading, source, samples)
    rows_read = _count(samples)
    return SourcePreview(
        name=file,
        samples=samples,
        reading=reading,
        why=_why(reading, counts, rows_read, by_fields=source.fields != Fields()),
        columns=columns,
        undecided=undecided,
        further=read_further(reading, source, samples),
        repairs=repairs,
        repaired=repaired,
        rendered=render(renderer, reading.kind, reading.rows) if reading.rows else None,
        entry=entry(file, source, reading, rows_read, repairs, repaired) if reading.used else "",
    )


def preview_config(content: str) -> Iterator[SourcePreview]:
    """Yield a preview of each source in the text from `corpora_of`.

    Raises:
        SnaketuneError: a template or tokenizer can't be read.
    """
    cached_renderer = cache(load_renderer)
    for raw_corpus in json.loads(content):
        corpus = PreviewedCorpus.model_validate(raw_corpus)
        template = Path(corpus.chat_template) if corpus.chat_template else None
        # The tokenizer if it exists, or the folder that it will be adopted from.
        folders = (Path(folder) for folder in (corpus.tokenizer, corpus.adopt) if folder)
        tokenizer = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
        renderer = cached_renderer(template, tokenizer, corpus.empty_reasoning)
        if template is None and tokenizer is None and corpus.adopt:
            named = f"{renderer.template}, instead of {corpus.adopt}'s own, which isn't available yet"
            renderer = replace(renderer, template=named)
        for number in range(1, len(corpus.content.sources) + 1):
            yield _preview_source(corpus, number, renderer)


def _preview_source(corpus: PreviewedCorpus, number: int, renderer: Renderer) -> SourcePreview:
    content = corpus.content
    source = content.sources[number - 1]
    samples = samples_of(source, content.kind)
    reading = read_as(content.kind, source, samples, content.repair, content.cleaning)
    label = f"{corpus.corpus}, source {number}" if len(content.sources) > 1 else corpus.corpus
    named = hub_name(source.hub) if source.hub else source.files[0]
    more = f" and {len(source.files) - 1} more" if len(source.files) > 1 else ""
    repairs, repaired = repairs_that_help(reading, source, samples)
    return SourcePreview(
        name=f"{label}: {named}{more}",
        samples=samples,
        reading=reading,
        why=f"as the config says; reads {_of(reading.used, _count(samples))}",
        columns=_unknown_columns(reading, samples),
        undecided=reading.unknown.detail if reading.unknown else "",
        further=read_further(reading, source, samples),
        repairs={name: count for name, count in repairs.items() if name not in content.repair},
        repaired=repaired,
        rendered=render(renderer, reading.kind, reading.rows, (corpus.train_on, corpus.reasoning))
        if reading.rows
        else None,
        configured=True,
        lengths=corpus.lengths or LENGTHS,
    )


def _why(reading: Reading, counts: dict[str, int], rows_read: int, *, by_fields: bool) -> str:
    if by_fields:
        return f"reads {_of(reading.used, rows_read)} with the `fields` suggested below; no layout is known"
    others = {kind: count for kind, count in counts.items() if kind not in (reading.kind, TEXT)}
    reads = [f"{kind}: {count:,}" for kind, count in others.items() if count]
    reads_too = ", ".join(reads) if reads else "no other kind reads any" if others else ""
    mixed = reads and reading.quarantined["missing_column"]
    advice = "; a corpus holds one kind, so split the file" if mixed else ""
    return f"reads {_of(reading.used, rows_read)}" + (f" ({reads_too})" if reads_too else "") + advice


def _of(count: int, rows: int) -> str:
    if count == rows:
        return f"all {rows:,} rows" if rows > 1 else "its only row"
    return f"{count:,} of {rows:,} rows"


def _count(samples: list[FileSample]) -> int:
    return sum(len(sample.raws) for sample in samples)


def _objects(samples: list[FileSample]) -> list[dict[str, Any]]:
    return [raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict)]


def _unknown_columns(reading: Reading, samples: list[FileSample]) -> dict[str, object]:
    """The most common set of columns, each with a value, if they don't decide the layout."""
    rows = _objects(samples)
    if not rows or reading.unknown is None:
        return {}
    columns = Counter(tuple(name for name, value in row.items() if value is not None) for row in rows)
    ((commonest, _),) = columns.most_common(1)
    return {column: next(row[column] for row in rows if row.get(column) is not None) for column in commonest}
