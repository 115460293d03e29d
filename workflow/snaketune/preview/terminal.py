"""A preview as text for a terminal: facts, rows, then lines for a config. The HTML page shows the same facts.

Supervised text is green if the terminal has colours, else in brackets. Control characters in the data are escaped.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from snaketune.corpus.excerpts import excerpt, printable
from snaketune.corpus.rows import TEXT
from snaketune.preview.config_entry import conditions
from snaketune.preview.reading import Reading
from snaketune.preview.rendered_rows import RenderedRow, RenderedRows, TextSpan
from snaketune.preview.source_preview import SourcePreview

BOLD, DIM, GREEN, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[0m"
WIDTH, LABEL = 108, 12
COLUMNS_SHOWN, REASONS_SHOWN, REFUSALS_SHOWN = 12, 8, 3
VALUE_LENGTH, DETAIL_LENGTH, REFUSAL_LENGTH = 60, 300, 160

# A label and the text beside it; without a label, it continues the fact before it.
Fact = tuple[str, str]


def has_colours(output: TextIO) -> bool:
    """Whether the output shows colours, and the user hasn't turned them off (https://no-color.org)."""
    return output.isatty() and not os.environ.get("NO_COLOR")


def as_text(preview: SourcePreview, *, colour: bool) -> Iterator[str]:
    paint = _Paint(colour)
    yield paint(BOLD, printable(preview.name))
    yield from (f"  {paint(DIM, printable(line))}" for line in file_lines(preview))
    for trouble in preview.trouble:
        yield from _wrapped("error", trouble, paint(RED, "error"))
    yield from [""] * bool(preview.rows_read)
    for label, about in facts(preview):
        yield from _wrapped(label, about, label)
    if preview.rendered and preview.rendered.rows:
        yield ""
        yield f"  {paint(BOLD, 'As the model sees it')}, {paint.legend}"
        for row in preview.rendered.rows:
            yield from _row(row, paint)
    if preview.entry:
        yield ""
        yield f"  {paint(BOLD, 'Config entry')}"
        yield ""
        yield from (f"    {printable(line)}" for line in preview.entry.splitlines())
    yield ""


class _Paint:
    def __init__(self, colour: bool):
        self.colour = colour
        self.legend = f"supervised text in {self(GREEN, 'green')}" if colour else "supervised text between ⟦ and ⟧"

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if self.colour and text else text

    def spans(self, spans: list[TextSpan]) -> str:
        output = ""
        weight = 0.0
        for span in spans:
            text = f"[… {span.omitted:,} characters …]" if span.omitted else _escaped(span.text)
            before, weight = weight, span.weight * span.supervised
            if weight not in (0, 1, before):
                text = f"×{weight:g} {text}"
            if not self.colour:
                output += "⟧" * (before not in (0, weight)) + "⟦" * (weight not in (0, before)) + text
            else:
                code = (GREEN if span.supervised else "") + (DIM if span.control or span.omitted else "")
                # Colour codes per line, for pagers.
                output += "\n".join(self(code, line) if code else line for line in text.split("\n"))
        return output + "⟧" * (weight > 0 and not self.colour)


def facts(preview: SourcePreview, *, complete: bool = False) -> Iterator[Fact]:
    """The facts about the rows. Args: complete: list all columns, reasons and refusals, uncut, instead of the first."""
    reading = preview.reading
    if not preview.rows_read:
        return
    yield "kind", f"{reading.kind}: {preview.why}" if reading.used else "none: no corpus kind matches these rows"
    if preview.columns:
        yield "columns", _listed({name: excerpt(value) for name, value in preview.columns.items()}, complete)
        first, *others = preview.undecided.split("\n")
        yield "layout", first
        yield from (("", line) for line in others)
    elif layouts := reading.layouts.most_common():
        yield "layout", ", ".join(f"{name} ({_rows(n)})" if len(layouts) > 1 else name for name, n in layouts)
    if reading.ignored:
        ignored = reading.ignored.most_common()
        summary = {name: f"{_rows(count)}, such as {excerpt(reading.values.get(name))}" for name, count in ignored}
        yield "ignored", _listed(summary, complete)
    if reading.frame:
        shared = ", ".join(
            f"{key} {excerpt(text)}" for key, text in reading.frame.model_dump(exclude_defaults=True).items()
        )
        yield (
            "frame",
            f"a run stops at marks of a chat template that nearly all rows share: {shared}; `frame` removes or keeps them",
        )
    if reading.in_question:
        what = f"`ignore: [{', '.join(reading.in_question)}]` states that they aren't part of the rows"
        yield "in question", f"a run stops at columns that may hold turns, or mark rows; {what}"
    if reading.marked:
        shown = reading.marked.most_common(None if complete else COLUMNS_SHOWN)
        marks = ", ".join(f"{mark} ({_rows(count)})" for mark, count in shown)
        yield "marked", f"{marks}; `where: {conditions(reading)[0][0]}` drops such rows"
    yield from _unused_rows(preview, complete)
    if reading.repeated and reading.repeats:
        example = reading.repeats
        what = f"such as {example.location}, which repeats {example.detail}; the first is used"
        yield "repeated", f"{_rows(reading.repeated)}, {what}"
    if preview.rendered:
        yield from _tokens(preview.rendered, preview.lengths, preview.estimated)
        yield from _template(preview.rendered, reading, complete)


def _unused_rows(preview: SourcePreview, complete: bool) -> Iterator[Fact]:
    reading, further = preview.reading, preview.further
    yield from _reasons("quarantined", reading, reading.quarantined, complete)
    if preview.repaired:
        yield "", f"`repair: [{', '.join(preview.repairs)}]` fixes {preview.repaired:,} of them"
    yield from _reasons("dropped", reading, reading.dropped, complete)
    if further and (lost := further.quarantined.total() + further.dropped.total()):
        yield "further on", f"of {further.used + lost:,} rows from the rest of the file, {lost:,} can't be used"
        yield from _reasons("", further, further.quarantined + further.dropped, complete, about="about ")


def _reasons(label: str, reading: Reading, counts: Counter[str], complete: bool, about: str = "") -> Iterator[Fact]:
    shown = counts.most_common(None if complete else REASONS_SHOWN)
    for reason, count in shown:
        example = reading.examples[reason]
        detail = f": {_cut(example.detail, DETAIL_LENGTH, complete)}" if example.detail else ""
        # The reason is a condition of `where`, which may have underscores.
        what = reason if reason.startswith("where ") else reason.replace("_", " ")
        yield label, f"{_rows(count)}, {what}; {about}{example.location}{detail}"
        label = ""
    if more := len(counts) - len(shown):
        yield "", f"and {more} more reasons"


def file_lines(preview: SourcePreview, *, complete: bool = False) -> Iterator[str]:
    """Format, size and number of rows of each file. Args: complete: of all files, not only of the first."""
    several = len(preview.samples) > 1
    shown = preview.samples if complete else preview.samples[:COLUMNS_SHOWN]
    for sample in shown:
        size = "" if sample.bytes is None else _size(sample.bytes)
        summary = ", ".join(filter(None, (sample.format, size)))
        if sample.raws:
            rows_read = len(sample.raws)
            if sample.whole:
                summary += f"; {_rows(rows_read)}"
            elif sample.rows:
                # An estimate is rounded to two digits.
                digits = max(0, len(str(sample.rows)) - 2) if sample.estimated else 0
                about = "about " if sample.estimated else ""
                summary += f"; {about}{round(sample.rows, -digits):,} rows, of which the first {rows_read:,} are read"
            else:
                summary += f"; the first {_rows(rows_read)} are read"
        if several:
            summary = f"{sample.name}: {summary}"
        if summary:
            yield summary
    if more := len(preview.samples) - len(shown):
        yield f"and {more} more files"


def _listed(details: dict[str, str], complete: bool) -> str:
    """Names with their details, as many as are readable."""
    shown = list(details.items())[: None if complete else COLUMNS_SHOWN]
    more = f" and {len(details) - len(shown)} more" if len(details) > len(shown) else ""
    return ", ".join(f"{name} ({_cut(about, VALUE_LENGTH, complete)})" for name, about in shown) + more


def _tokens(rendered: RenderedRows, lengths: tuple[int, ...], estimated: str) -> Iterator[Fact]:
    if not len(rendered.lengths):
        return
    median, most = (int(np.quantile(rendered.lengths, share)) for share in (0.5, 0.9))
    about = "" if rendered.exact else "about "
    yield (
        "tokens",
        f"{about}{median:,} per row in the median, 90% of rows at most {most:,}, the longest {int(rendered.lengths.max()):,}; "
        f"{rendered.supervised:.0%} of all tokens supervised",
    )
    longer = rendered.longer(lengths)
    summary = ", ".join(f"{length:,}: {_rows(count)}" for length, count in longer.items() if count)
    yield "", f"longer than {summary}" if summary else f"no row longer than {next(iter(longer)):,}"
    if rendered.unsupervised:
        yield "", f"{_rows(rendered.unsupervised)} with nothing supervised"
    if estimated:
        yield "", estimated


def _template(rendered: RenderedRows, reading: Reading, complete: bool) -> Iterator[Fact]:
    if reading.kind != TEXT:
        yield "template", rendered.template
    if rendered.control_text:
        yield "", f"{_rows(rendered.control_text)} with text like a control token; it stays text"
    if rendered.refused:
        summary = f"{len(rendered.refused):,} of {_rows(len(reading.rows))} by the template, which are quarantined"
        yield "refused", f"{summary}, or with `on_template_error: fail` of the tokenizer fail the stage"
    for location, why in rendered.refused[: None if complete else REFUSALS_SHOWN]:
        yield "", f"{location}: {_cut(why, REFUSAL_LENGTH, complete)}"


def _row(row: RenderedRow, paint: _Paint) -> Iterator[str]:
    yield ""
    yield f"  {paint(BOLD, printable(row.location))}"
    for title, spans in (("", row.prompt), *row.parts) if row.prompt else row.parts:
        if title:
            yield f"  {paint(DIM, '·')} {paint(BOLD, title)}"
        yield from (f"    {line}" for line in paint.spans(spans).rstrip("\n").split("\n"))


def _wrapped(label: str, about: str, painted: str) -> Iterator[str]:
    """Yield a label and the text beside it, wrapped. Args: painted: the label with colour codes, which take no space."""
    lines = textwrap.wrap(printable(about), WIDTH - LABEL, break_on_hyphens=False) or [""]
    yield f"  {painted}{' ' * (LABEL - len(label))}{lines[0]}"
    yield from (" " * (2 + LABEL) + line for line in lines[1:])


def _escaped(text: str) -> str:
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _cut(text: str, limit: int, complete: bool) -> str:
    return text if complete or len(text) <= limit else f"{text[:limit]}…"


def _size(size: int) -> str:
    """
    >>> _size(999), _size(1_234_567)
    ('999 bytes', '1.2 MB')
    """
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
