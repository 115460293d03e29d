"""The first pass: the raw rows of one part of a corpus to valid, cleaned rows on disk, with all that decisions need of them.

    rows.arrow                 the rows (`selecting.row_store`)
    records.arrow              for each row: hash of its content, hash of its prompt, characters, number of its origin, and
                               the number in its `order_column`, if the corpus has one
    quarantine.jsonl           malformed rows: a record, and the repairs that would make the row valid
    texts/, prompts/           signatures for near duplicates, where these are configured
    hits.jsonl, places.jsonl   n-grams of evaluation data in rows, and where rows are from, with `decontamination`
    facts.json                 counts by source, origins by number, and what is checked once whole files have been read

The numbers of lines in a range of a file count from the range; records have the number of the range as `range`.
"""

import gc
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import printable
from snaketune.corpus.layouts.canonical import ROWS_COMPARED, FileChecks, canonical_rows, layout_of
from snaketune.corpus.layouts.unstated import ROWS_BEFORE_STOP, UnstatedColumns
from snaketune.corpus.quarantine import Recorder
from snaketune.corpus.reading.formats import TextKeys
from snaketune.corpus.reading.ranges import LineSpan, Range, read_range
from snaketune.corpus.reading.sources import hub_name, read_files, read_hub
from snaketune.corpus.rows import TEXT, Dropped, Malformed, RawRow, Row, RowResult, content_hash
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.selecting.contamination import HitWriter
from snaketune.corpus.selecting.evaluation_ngrams import EvaluationNgrams
from snaketune.corpus.selecting.near_duplicates import SignatureWriter
from snaketune.corpus.selecting.row_store import ROWS_PER_BATCH, RowWriter
from snaketune.corpus.selecting.scanned_parts import (
    FACTS,
    MAX_NAMES,
    ORDER,
    QUARANTINE,
    RECORD_FILE,
    RECORDS,
    SourceCounts,
    limit_names,
)
from snaketune.corpus.selecting.splits import prompt_hash, split_key
from snaketune.corpus.selecting.words import compared_texts
from snaketune.corpus.values.cells import column_of, wrong_type
from snaketune.corpus.values.frames import SharedFrame
from snaketune.corpus.values.row_file import RowFile
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.locations import File
from snaketune.patterns import TooSlow, search
from snaketune.progress import progress
from snaketune.stages.specs import ReadSpec
from snaketune.tables import write_table

MAX_CHARACTERS = 2**32 - 1
# Type codes of arrays, by column of the records.
CODES = {"content": "Q", "prompt": "Q", "characters": "I", "origin": "I", "order": "d"}
OBJECTS_BETWEEN_COLLECTIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class RangeFacts:
    """What a range of a file leaves to be checked with the file's other ranges.

    Attributes:
        source: number of its source in the part.
        lines: the lines that it covers, if its rows are numbered from its own first line.
    """

    source: int
    name: str
    lines: int | None
    checks: dict[str, Any]
    unstated: dict[str, Any]


class Scan(ExitStack):
    """Reads every source of a part in turn, inside `with`; call `finish` after the last."""

    def __init__(self, spec: ReadSpec, folder: Path, evaluations: list[EvaluationNgrams]):
        super().__init__()
        self.spec, self.folder = spec, folder
        self.cleaner = Cleaner(spec.cleaning)
        self.recorder = Recorder(self.cleaner.mask)
        self.rows = self.enter_context(RowWriter(folder, spec.kind))
        self.quarantine = self.enter_context((folder / QUARANTINE).open("w", encoding="utf-8"))
        # A column of `records.arrow` each; numbers take less memory than objects.
        self.records = {field.name: array(CODES[field.name]) for field in (*RECORDS, ORDER)}
        near, ngram = spec.near_duplicates, spec.ngram
        self.signatures = self.enter_context(SignatureWriter(folder, near.threshold, near.shingle)) if near else None
        self.hits = self.enter_context(HitWriter(folder, evaluations, spec.own_held_out)) if ngram else None
        self.sources: list[SourceCounts] = []
        self.ranges: list[RangeFacts] = []
        self.known_origins: dict[tuple[str, tuple[str, ...]], int] = {}
        self.batch: list[Row] = []
        self.locations: list[dict[str, Any]] = []

    def read(self, source: Source, paths: list[File], ranges: list[Range]) -> None:
        """Args: ranges: of each file, the range that is read."""
        counts = SourceCounts()
        self.sources.append(counts)
        with _rare_collections():
            if source.hub:
                self._read(hub_name(source.hub), read_hub(source.hub), source)
            keys = TextKeys(source.encoding, source.delimiter, source.header)
            for file, path, part in zip(source.files, paths, ranges):
                if part.last - part.first + 1 < part.count:
                    self._read_range(file, path, part, source, keys)
                else:
                    self._read_file(file, path, source, keys)

    def finish(self) -> dict[str, int]:
        """Write what is left of the rows, the records and `facts.json`. Return counts of rows."""
        if self.batch:
            self._flush()
        schema = RECORDS.append(ORDER) if self.spec.order_column else RECORDS
        # In one batch, so that each column can be mapped as a whole.
        table = pa.table({field.name: np.asarray(self.records[field.name]) for field in schema}, schema=schema)
        write_table(self.folder / RECORD_FILE, table, max(1, len(table)))
        facts = {
            **self.rows.facts,
            "sources": [vars(counts) for counts in self.sources],
            "ranges": [vars(facts) for facts in self.ranges],
            "origins": list(self.known_origins),
            "cleaned": {step: n for step, n in self.cleaner.counts.items() if n},
            "evaluations": self.hits.names if self.hits else [],
        }
        write_json(self.folder / FACTS, facts)
        return {name: sum(getattr(counts, name) for counts in self.sources) for name in ("read", "quarantined", "rows")}

    def _read_file(self, file: str, path: File, source: Source, keys: TextKeys) -> None:
        for name, raws in read_files(path, file, plain=self.spec.kind == TEXT, keys=keys):
            self._read(name, raws, source)

    def _read_range(self, name: str, path: File, part: Range, source: Source, keys: TextKeys) -> None:
        plain = self.spec.kind == TEXT
        read = read_range(path, name, part, rows_compared=ROWS_COMPARED, plain=plain, keys=keys)
        if read:
            with named_errors(name):
                file = layout_of(read.head, self.spec.kind, source)
        if read is None or file.joins:
            if part.first == 1:
                self._read_file(name, path, source, keys)
            return
        self._read(name, read.rows, source, _OfRange(part, file, FileChecks(source), read.label, read.span))

    def _read(self, name: str, raws: Iterable[RawRow], source: Source, part: "_OfRange | None" = None) -> None:
        counts, label = self.sources[-1], part.label if part else name
        read = counts.read

        def counted() -> Iterator[RawRow]:
            for raw in progress(raws, label, "rows"):
                counts.read += 1
                yield raw

        results, unstated, shared = 0, UnstatedColumns(source, self.spec.order_column), SharedFrame(source)
        more = {"file": part.file, "checks": part.checks} if part else {}
        # What the first rows of a file share is for the range that has them.
        compares = self.spec.kind != TEXT and (part is None or part.range.first == 1)
        # Of a row's location.
        location = {"file": name} | ({"range": len(self.ranges)} if part and part.span else {})
        with named_errors(label):
            for result in canonical_rows(
                counted(), kind=self.spec.kind, source=source, repair=self.spec.repair, **more
            ):
                results += 1
                if compares and isinstance(result.row, Row):
                    shared.add(result.row)
                try:
                    self._add(location, result, unstated)
                except TooSlow as error:
                    raise SnaketuneError(f"{label}, {result.raw.unit} {result.raw.number}: {error}") from None
                if unstated.in_question and results >= ROWS_BEFORE_STOP:
                    unstated.check(label, self.spec.kind)
                if results == ROWS_BEFORE_STOP:
                    shared.check(label)
        if part is None:
            unstated.finish()
        unstated.check(label, self.spec.kind)
        shared.check(label)
        counts.extra += results - (counts.read - read)
        if part:
            lines = part.span.count if part.span else None
            facts = {"lines": lines, "checks": part.checks.state(), "unstated": unstated.state()}
            self.ranges.append(RangeFacts(source=len(self.sources) - 1, name=name, **facts))

    def _add(self, location: dict[str, Any], result: RowResult, unstated: UnstatedColumns) -> None:
        row, counts = result.row, self.sources[-1]
        if row is None:
            counts.joined += 1
            unstated.add(result)
            _count(result.ignored, counts.ignored)
            return
        try:
            if isinstance(row, Malformed | Dropped):
                raise row
            if result.raw.notes:
                row.notes += result.raw.notes
            if self.cleaner.active:
                row = self.cleaner.clean(row)
            if self.spec.answer_pattern and row.answer is None:
                _find_answer(row, self.spec.answer_pattern)
            content = content_hash(row)
            if column := self.spec.order_column:
                self.records["order"].append(_number(result.raw.value, column))
                result = result._replace(ignored=tuple(name for name in result.ignored if name != column))
        except Malformed as error:
            record = self.recorder.record(location["file"], result.raw, error)
            range_ = {key: location[key] for key in ("range",) if key in location}
            self.quarantine.write(json.dumps([record | range_, error.repairs]) + "\n")
            counts.quarantined += 1
            return
        except Dropped as error:
            counts.dropped[error.reason] += 1
            return
        unstated.add(result)
        _count(result.ignored, counts.ignored)
        _count(result.marks, counts.marked)
        counts.rows += 1
        origin = result.layout, row.notes
        self.records["content"].append(content)
        self.records["prompt"].append(prompt_hash(split_key(row.opening), self.spec.split_seed))
        self.records["origin"].append(self.known_origins.setdefault(origin, len(self.known_origins)))
        self.batch.append(row)
        if self.hits:
            self.locations.append(location | {result.raw.unit: result.raw.number})
        if len(self.batch) == ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        characters = np.minimum(self.rows.append(self.batch), MAX_CHARACTERS)
        self.records["characters"].frombytes(characters.astype(np.uint32).tobytes())
        if self.signatures:
            self.signatures.append(self.batch)
        if self.hits:
            turns = [compared_texts(row.turns) for row in self.batch]
            self.hits.append(turns, self.locations, self.records["content"][-len(self.batch) :])
        # New lists, because a cleared list would keep its memory.
        self.batch, self.locations = [], []


@dataclass(frozen=True)
class _OfRange:
    range: Range
    file: RowFile
    checks: FileChecks
    label: str
    span: LineSpan | None


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Name the file in errors that are about it as a whole."""
    try:
        yield
    except Malformed as error:
        raise SnaketuneError("\n".join(map(printable, f"{name}: {error.detail}".split("\n")))) from None


def _count(names: tuple[str, ...], counted: Counter[str]) -> None:
    for name in names:
        counted[name] += 1
    # Where keys are ids, there may be as many as rows.
    if len(counted) > 2 * MAX_NAMES:
        limit_names(counted)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often: rows hold no reference cycles, and a collection per batch costs a tenth."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _number(raw: Any, column: str) -> float:
    """Return the number in a column of a raw row, also one written as a text, as in CSV; Malformed if there is none."""
    value = column_of(raw, column)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise wrong_type(column, value, "a number, by which rows are ordered (order_column)")
    return number


def _find_answer(row: Row, pattern: str) -> None:
    match = search(pattern, row.reply)
    row.answer = ((match and match[1]) or "").strip() or None
    if row.answer is None:
        row.notes += ("no_answer",)
