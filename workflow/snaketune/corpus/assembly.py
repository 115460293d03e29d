"""The work of the corpus' stages: raw rows from every source, cleaned, without duplicates, split by prompt.

    read      raw → canonical → cleaned → rows on disk, with a record of 24 bytes about each   (`first_pass`)
    decide    duplicates, near duplicates, contamination, caps, split and weights, from the records   (`decisions`)
    filter    the rows that are used → train-00000.arrow, held_out-00000.arrow, …   (`last_pass`)

A corpus of one part does all of it in one job; of several, `read` and `filter` are a job per part, and `corpus` links the files
of `filter`. Both give the same bytes.

Rows stay in order, so a source in another format with the same rows gives the same files byte for byte. Every row is
counted: read + extra + repeated = joined + quarantined + dropped + kept. Memory grows with the number of rows, not with the
length of the text: 600 MB for ten million rows. One core processes 60,000 short rows a second without optional steps, and
18,000 with near duplicates.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.config.corpus_sources import Source
from snaketune.corpus.counts import counts_of
from snaketune.corpus.decided_files import write_duplicates, write_order
from snaketune.corpus.decisions import Decisions, decide
from snaketune.corpus.excerpts import print_line
from snaketune.corpus.first_pass import Scan, named_errors
from snaketune.corpus.last_pass import FACTS, ROWS_WRITTEN, write_files
from snaketune.corpus.layouts.canonical import FileChecks
from snaketune.corpus.layouts.unstated import UnstatedColumns
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.reading.ranges import Range
from snaketune.corpus.reading.sources import hub_name
from snaketune.corpus.selecting.evaluation_ngrams import load_evaluations
from snaketune.corpus.selecting.scanned_parts import QUARANTINE, ScannedParts, SourceCounts
from snaketune.errors import SnaketuneError
from snaketune.locations import File
from snaketune.stages.cache.payload_files import place
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CorpusSpec, ReadSpec

# The layouts of rows from scored responses (`sampling.selection`).
LAYOUTS = {"conversations": "messages", "preferences": "pairs", "unpaired": "unpaired"}
DUPLICATES = "duplicates.jsonl"
CONTAMINATION = "contamination.jsonl"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What is decided about the rows of a corpus, and what its manifest says."""

    decisions: Decisions
    counts: dict[str, Any]
    about: dict[str, Any]
    records: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        return Outcome(counts=self.counts, about=self.about, records=self.records)


def build(
    spec: CorpusSpec,
    work: WorkFolder,
    *,
    files: list[File],
    against: list[Artifact],
    against_files: list[File],
    selected: Sequence[Artifact] = (),
    decided: Sequence[Artifact] = (),
    filtered: Sequence[Artifact] = (),
) -> Outcome:
    """Write a corpus to the payload (`train-00000.arrow`, `held_out-00000.arrow`, …), with the records of quarantined and
    dropped rows.

    Args:
        files: the files of all sources, in order.
        against: corpora whose held-out rows train rows are compared with, where `decontamination` is configured.
        against_files: data files of evaluation tasks that train rows are compared with likewise.
        selected: rows from scored responses, for each source of such.
        decided, filtered: the result of `decide` and those of `filter`, if the corpus is read in parts; then nothing else is.
    Raises:
        SnaketuneError: a file can't be read, too many rows are malformed, or no row is left.
    """
    if decided:
        return _linked(work, decided[0], filtered)
    scanned = work.state / "scanned"
    scanned.mkdir(parents=True, exist_ok=True)
    ngram = spec.decontamination and spec.decontamination.ngram
    shared = {key: getattr(spec, key) for key in CorpusSpec.model_fields.keys() & ReadSpec.model_fields.keys()}
    reading = ReadSpec(**shared, ngram=ngram, own_held_out=0 < spec.held_out < 1)
    read_sources(reading, scanned, files, against, against_files, selected)
    parts = ScannedParts([scanned], len(spec.sources), [range(len(spec.sources))])
    made = decide_rows(spec, work, parts)
    write_files(parts, parts.format(spec.kind), made.decisions.by_split, work.payload)
    return made.outcome


def _linked(work: WorkFolder, decided: Artifact, filtered: Sequence[Artifact]) -> Outcome:
    facts = json.loads(decided.file(FACTS).read_text(encoding="utf-8"))
    kept = [path for path in decided.files() if path.name not in (FACTS, ROWS_WRITTEN)]
    records = [decided.file(name) for name in facts["records"]]
    for path in [*(path for part in filtered for path in part.files()), *kept, *records]:
        place(path, work.payload / path.name)
    return Outcome(counts=facts["counts"], about=facts["about"], records=tuple(facts["records"]))


def read_sources(
    spec: ReadSpec,
    folder: Path,
    files: list[File],
    against: list[Artifact],
    against_files: list[File],
    selected: Sequence[Artifact],
) -> dict[str, int]:
    """Do the first pass over the sources of a part. Return its counts of rows."""
    evaluations = load_evaluations(against, against_files, spec.ngram) if spec.ngram else []
    with Scan(spec, folder, evaluations) as scan:
        for source, paths, ranges in _with_files(spec, files, selected):
            scan.read(source, paths, ranges)
        return scan.finish()


def decide_rows(spec: CorpusSpec, work: WorkFolder, parts: ScannedParts) -> Decided:
    """Decide about all rows, and write the records, and the numbers that rows are ordered by, to the payload."""
    for name in (QUARANTINE, CONTAMINATION):
        # Left by an earlier attempt.
        (work.folder / name).unlink(missing_ok=True)
    with (work.payload / QUARANTINE).open("w", encoding="utf-8") as record:
        quarantine = Quarantine(record)
        for part in parts:
            for row, repairs in part.quarantined():
                quarantine.add(row, repairs)
    for source, counts in zip(spec.sources, parts.sources):
        _log_unread(source, counts)
    _check_ranges(spec, parts)
    total_rows = sum(source.read + source.extra for source in parts.sources)
    quarantine.check_limit(total_rows, parts.rows, spec.max_quarantined_fraction, work.folder / QUARANTINE)
    _check_sources(spec, parts, work)
    decisions = decide(parts, spec, contamination_record=work.payload / CONTAMINATION)
    counts = counts_of(parts, spec, quarantine, decisions)
    if not sum(counts["kept"].values()):
        dropped = "".join(f"\n  {n} × {reason}" for reason, n in counts["dropped"].items() if n)
        what = f"none of the {total_rows} rows is left; dropped:{dropped}\n{_save_records(work)}"
        raise SnaketuneError(f"{what}Relax the conditions, or add rows")
    if spec.order_column:
        write_order(parts, decisions.by_split, work.payload)
    about, records = {}, [QUARANTINE]
    if decisions.group is not None:
        write_duplicates(parts, parts.format(spec.kind), decisions, work.payload / DUPLICATES)
        records.append(DUPLICATES)
    if spec.decontamination:
        about["contamination"] = {"ngram": spec.decontamination.ngram, "hits": decisions.contamination_hits}
        records.append(CONTAMINATION)
    return Decided(decisions=decisions, counts=counts, about=about, records=tuple(records))


def _save_records(work: WorkFolder) -> str:
    """Move non-empty records out of the payload, which the next attempt empties, and return where they are."""
    message = ""
    for name in (QUARANTINE, CONTAMINATION):
        record = work.payload / name
        if record.is_file() and record.stat().st_size:
            message += f"See {record.replace(work.folder / name)}\n"
    return message


def _with_files(
    spec: ReadSpec, files: list[File], selected: Sequence[Artifact]
) -> Iterator[tuple[Source, list[File], list[Range]]]:
    """Each source with its files and their ranges; one of scored responses as a source of the file that holds its rows."""
    expected = sum(len(source.files) for source in spec.sources)
    if len(files) != expected:
        what = f"the sources name {expected} files, --files has {len(files)}"
        raise SnaketuneError(f"{what}; pass the same files, in the same order")
    paths, results = zip(files, spec.ranges or [Range()] * len(files)), iter(selected)
    for source in spec.sources:
        if source.scores:
            (path,) = next(results).files()
            yield Source(files=(str(path),), layout=LAYOUTS[spec.kind]), [path], [Range()]
        else:
            named = [next(paths) for _ in source.files]
            yield source, [path for path, _ in named], [Range(*range_) for _, range_ in named]


def _check_ranges(spec: CorpusSpec, parts: ScannedParts) -> None:
    """Check files of which several jobs read a range each, as a whole."""
    for (number, name), ranges in parts.ranges.items():
        source = spec.sources[number]
        checks, unstated = FileChecks(source), UnstatedColumns(source, spec.order_column)
        with named_errors(name):
            for range_ in ranges:
                checks.merge(range_["checks"])
                unstated.merge(range_["unstated"])
            checks.finish()
        unstated.finish()
        unstated.check(name, spec.kind)


def _check_sources(spec: CorpusSpec, parts: ScannedParts, work: WorkFolder) -> None:
    """Raise SnaketuneError if all rows of a source are malformed, however few they are among those of the corpus, unless the
    config allows any share."""
    for source, counts in zip(spec.sources, parts.sources):
        if counts.quarantined and not (counts.rows or counts.dropped) and spec.max_quarantined_fraction < 1:
            what = f"none of the {counts.quarantined} rows of the source {_name_of(source)} can be used"
            raise SnaketuneError(f"{what}\n{_save_records(work)}Check its `layout` and `fields`, or remove the source")


def _name_of(source: Source) -> str:
    more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
    return hub_name(source.hub) if source.hub else f"{source.files[0]}{more}" if source.files else source.scores


def _log_unread(source: Source, counts: SourceCounts) -> None:
    """Log the columns and keys that aren't read, and the rows that are used although a column marks them as bad."""
    name = _name_of(source)
    if counts.ignored:
        what = f"ignored, because its layout doesn't read them: {_rows_of_each(counts.ignored)}"
        print_line(f"{name}: {what}; to use one, map columns with `fields`")
    if counts.marked:
        what = f"used although a column marks them as bad: {_rows_of_each(counts.marked)}"
        condition = counts.marked.most_common(1)[0][0].replace(": ", " != ", 1)
        print_line(f"{name}: {what}; to drop them, set the source's `where`, for instance `where: {condition}`")


def _rows_of_each(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({n} rows)" for name, n in names.most_common())
