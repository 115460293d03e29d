"""Raw rows read as one kind of corpus: canonical rows, what is quarantined or dropped and why, and what isn't read.

For a file that isn't in a config, each kind is tried, and the one that reads most rows is used; of several, the first of KINDS.
Documents are used only if no other kind reads half of the rows, because conversations often have a column `text`, too.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from snaketune.config.corpora import Cleaning, Repair
from snaketune.config.corpus_sources import Frame, Source
from snaketune.corpus.layouts.canonical import FileChecks, canonical_rows
from snaketune.corpus.layouts.recognise import UnknownLayout
from snaketune.corpus.layouts.unstated import UnstatedColumns, values_at
from snaketune.corpus.rows import TEXT, Dropped, Malformed, Row, RowResult, content_hash
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.values.frames import SharedFrame
from snaketune.patterns import TooSlow
from snaketune.preview.sample import FORMATS, FileSample

KINDS = ("conversations", "preferences", "unpaired")
REPAIRS: tuple[Repair, ...] = get_args(Repair)
REPAIRED = "repaired_"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example of several rows: its location, and a detail."""

    location: str
    detail: str = ""


@dataclass(kw_only=True)
class Reading:
    """Outcome of the rows read.

    Attributes:
        rows: canonical rows, each with its location; of duplicates, only the first.
        layouts: number of rows by layout.
        used: raw rows that gave a row or are part of one.
        quarantined, dropped: number of rows by reason.
        examples: by reason, an example of these rows.
        ignored: by column or key of a turn, the number of rows in which it holds something and isn't read.
        values: an example value of each of these columns and keys.
        in_question: those of them for which a run stops, each with a place and an excerpt.
        frame: marks of a chat template that nearly all rows of a file share, for which a run stops, too.
        marked: by mark of a bad row, such as `is_correct: false`, the number of rows that have it.
        repeated: number of rows that are duplicates of an earlier one.
        repeats: an example of these.
        repairs: by repair, the number of rows that it changed.
        trouble: errors about a file as a whole.
        unknown: the error about a file whose columns don't decide its layout.
    """

    kind: str
    rows: list[tuple[str, Row]] = field(default_factory=list)
    layouts: Counter[str] = field(default_factory=Counter)
    used: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Example] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    values: dict[str, Any] = field(default_factory=dict)
    in_question: dict[str, tuple[str, str]] = field(default_factory=dict)
    frame: Frame | None = None
    marked: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    repeats: Example | None = None
    repairs: Counter[str] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)
    unknown: UnknownLayout | None = None

    @property
    def score(self) -> tuple[int, bool, bool, int]:
        """Sort key of how well the kind suits; at the end whether stating a layout helps, and columns in question (negated)."""
        undecided = self.unknown is not None and bool(self.unknown.layouts)
        return self.used, self.unknown is None, undecided, -len(self.in_question)


def read_as(
    kind: str,
    source: Source,
    samples: list[FileSample],
    repair: tuple[Repair, ...] = (),
    cleaning: Cleaning | None = None,
) -> Reading:
    cleaner = Cleaner(cleaning or Cleaning())
    reading = Reading(kind=kind)
    first: dict[int, str] = {}
    for sample in samples:
        used: set[int] = set()
        unstated, shared = UnstatedColumns(source), SharedFrame(source)
        try:
            # Of a part of a file, what only all rows show isn't checked.
            checks = None if sample.whole else FileChecks(source)
            for result in canonical_rows(sample.raws, kind=kind, source=source, repair=repair, checks=checks):
                file = f"{sample.name}, " if len(samples) > 1 else ""
                if _add(reading, result, f"{file}{result.raw.unit} {result.raw.number}", cleaner, first):
                    used.add(result.raw.number)
                    unstated.add(result)
                    if kind != TEXT and isinstance(result.row, Row):
                        shared.add(result.row)
        except UnknownLayout as error:
            reading.unknown = reading.unknown or error
        except Malformed as error:
            reading.trouble.append(f"{sample.name}: {error.detail}")
        unstated.finish()
        reading.in_question |= unstated.in_question
        reading.frame = reading.frame or (None if source.frame else shared.frame)
        reading.used += len(used)
    return reading


def best_reading(source: Source, samples: list[FileSample]) -> tuple[Reading, dict[str, int]]:
    """The reading with the kind that suits best, and the number of rows that each kind reads."""
    documents = read_as(TEXT, source, samples)
    # One at a time, so that at most two readings of a large file are in memory.
    best, counts = documents, {TEXT: documents.used}
    if all(sample.format.startswith(FORMATS[TEXT]) for sample in samples if sample.raws):
        return best, counts
    for kind in reversed(KINDS):
        reading = read_as(kind, source, samples)
        counts[kind] = 0 if reading.in_question else reading.used
        if best is documents or reading.score >= best.score:
            best = reading
    rows = sum(len(sample.raws) for sample in samples)
    return documents if 2 * best.used < rows and documents.used > best.used else best, counts


def read_further(reading: Reading, source: Source, samples: list[FileSample]) -> Reading | None:
    """Read rows from the rest of the files like the first ones; None if there are none, or rows depend on other rows."""
    further = [replace(sample, raws=sample.further) for sample in samples if sample.further]
    if not further or "message-tree" in reading.layouts:
        return None
    layout = next(iter(reading.layouts), source.layout)
    return read_as(reading.kind, source.model_copy(update={"layout": layout}), further)


def repairs_that_help(reading: Reading, source: Source, samples: list[FileSample]) -> tuple[dict[str, int], int]:
    """Repairs that fix quarantined rows, with the rows that each changes; and how many more rows could be used."""
    if not reading.quarantined or reading.kind == TEXT:
        return {}, 0
    repaired = read_as(reading.kind, source, samples, REPAIRS)
    return dict(repaired.repairs), max(0, repaired.used - reading.used)


def _add(reading: Reading, result: RowResult, location: str, cleaner: Cleaner, first: dict[int, str]) -> bool:
    """Count a row; return True if it is used."""
    row = result.row
    try:
        if isinstance(row, Malformed | Dropped):
            raise row
        if row is not None:
            row = cleaner.clean(row) if cleaner.active else row
            content = content_hash(row)
    except Malformed as error:
        reading.quarantined[error.reason] += 1
        reading.examples.setdefault(error.reason, Example(location=location, detail=error.detail))
        return False
    except TooSlow as error:
        reading.trouble.append(f"{location}: {error}")
        return False
    except Dropped as error:
        reading.dropped[error.reason] += 1
        reading.examples.setdefault(error.reason, Example(location=location))
        return False
    for name in result.ignored:
        reading.ignored[name] += 1
        if name not in reading.values and isinstance(result.raw.value, dict):
            reading.values[name] = next(values_at(result.raw.value, name), None)
    reading.marked.update(result.marks)
    if row is None:
        return True
    reading.layouts[result.layout] += 1
    reading.repairs.update(
        note.removeprefix(REPAIRED).replace("_", "-") for note in row.notes if note.startswith(REPAIRED)
    )
    if content in first:
        reading.repeated += 1
        reading.repeats = reading.repeats or Example(location=location, detail=first[content])
    else:
        first[content] = location
        reading.rows.append((location, row))
    return True
