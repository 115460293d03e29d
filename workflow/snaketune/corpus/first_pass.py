"""The first pass: raw rows to valid, cleaned rows in the spool, and 24 bytes about each in memory, for the decisions."""

import gc
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import print_line, printable
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.layouts.unstated import ROWS_BEFORE_STOP, UnstatedColumns
from snaketune.corpus.quarantine import Quarantine
from snaketune.corpus.reading.formats import TextKeys
from snaketune.corpus.reading.sources import hub_name, read_files, read_hub
from snaketune.corpus.rows import TEXT, Dropped, Malformed, RawRow, Row, RowResult, content_hash
from snaketune.corpus.selecting.cleaning import Cleaner
from snaketune.corpus.selecting.contamination import Contamination
from snaketune.corpus.selecting.near_duplicates import NearDuplicateSearch
from snaketune.corpus.selecting.splits import prompt_hash, split_key
from snaketune.corpus.selecting.spool import ROWS_PER_BATCH, Spool
from snaketune.corpus.selecting.words import compared_texts
from snaketune.corpus.values.cells import column_of, wrong_type
from snaketune.corpus.values.frames import SharedFrame
from snaketune.errors import SnaketuneError
from snaketune.locations import File
from snaketune.patterns import TooSlow, search
from snaketune.progress import progress
from snaketune.stages.specs import CorpusSpec

MAX_CHARACTERS = 2**32 - 1
MAX_NAMES = 200
OTHER_NAMES = "…"
OBJECTS_BETWEEN_COLLECTIONS = 100_000


@dataclass
class SourceCounts:
    """Counts of the raw rows of one source, by outcome.

    Attributes:
        read: raw rows.
        extra: rows that a raw row gave after its first.
        joined: raw rows that became part of another row.
        ignored: by column or key (such as `messages[].name`), the used raw rows in which it holds something and isn't read.
        marked: by mark of a bad row, such as `is_correct: false`, the used raw rows that have it.
        rows: the range of its valid rows.
    """

    read: int = 0
    extra: int = 0
    joined: int = 0
    quarantined: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    marked: Counter[str] = field(default_factory=Counter)
    rows: slice = field(default_factory=lambda: slice(0, 0))


@dataclass(kw_only=True)
class Scan:
    """Reads every source in turn; call `finish` after the last.

    Attributes:
        near_duplicates, contamination: compare the words of rows, where they are configured.
        hashes, prompt_hashes, characters, origins: for each valid row, the hash of its content, the hash of its prompt, its
            length, and the number of its origin.
        known_origins: layout and notes of each origin, with its number.
        order: the number in each valid row's `order_column`, if the corpus has one.
    """

    spec: CorpusSpec
    spool: Spool
    quarantine: Quarantine
    cleaner: Cleaner
    near_duplicates: NearDuplicateSearch | None
    contamination: Contamination | None

    def __post_init__(self) -> None:
        self.hashes, self.prompt_hashes, self.characters, self.origins = (array(type_) for type_ in "QQII")
        self.order = array("d")
        self.known_origins: dict[tuple[str, tuple[str, ...]], int] = {}
        self.batch: list[Row] = []
        self.locations: list[tuple[str, RawRow]] = []

    def read(self, source: Source, paths: list[File]) -> SourceCounts:
        counts = SourceCounts()
        first = len(self.hashes)
        with _rare_collections():
            if source.hub:
                self._read(hub_name(source.hub), read_hub(source.hub), source, counts)
            keys = TextKeys(source.encoding, source.delimiter, source.header)
            for file, path in zip(source.files, paths):
                for name, raws in read_files(path, file, plain=self.spec.kind == TEXT, keys=keys):
                    self._read(name, raws, source, counts)
        counts.rows = slice(first, len(self.hashes))
        _log_unread(source, counts)
        return counts

    def finish(self) -> None:
        if self.batch:
            self._flush()

    def _read(self, name: str, raws: Iterable[RawRow], source: Source, counts: SourceCounts) -> None:
        read = counts.read

        def counted() -> Iterator[RawRow]:
            for raw in progress(raws, name, "rows"):
                counts.read += 1
                yield raw

        results, unstated, shared = 0, UnstatedColumns(source, self.spec.order_column), SharedFrame(source)
        try:
            for result in canonical_rows(counted(), kind=self.spec.kind, source=source, repair=self.spec.repair):
                results += 1
                if self.spec.kind != TEXT and isinstance(result.row, Row):
                    shared.add(result.row)
                self._add(name, result, counts, unstated)
                if unstated.in_question and results >= ROWS_BEFORE_STOP:
                    unstated.check(name, self.spec.kind)
                if results == ROWS_BEFORE_STOP:
                    shared.check(name)
        except TooSlow as error:
            raise SnaketuneError(f"{name}, {result.raw.unit} {result.raw.number}: {error}") from None
        except Malformed as error:
            # It is about the file as a whole.
            raise SnaketuneError("\n".join(map(printable, f"{name}: {error.detail}".split("\n")))) from None
        unstated.finish()
        unstated.check(name, self.spec.kind)
        shared.check(name)
        counts.extra += results - (counts.read - read)

    def _add(self, name: str, result: RowResult, counts: SourceCounts, unstated: UnstatedColumns) -> None:
        row = result.row
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
                self.order.append(_number(result.raw.value, column))
                result = result._replace(ignored=tuple(name for name in result.ignored if name != column))
        except Malformed as error:
            self.quarantine.add(name, result.raw, error)
            counts.quarantined += 1
            return
        except Dropped as error:
            counts.dropped[error.reason] += 1
            return
        unstated.add(result)
        _count(result.ignored, counts.ignored)
        _count(result.marks, counts.marked)
        self.hashes.append(content)
        self.prompt_hashes.append(prompt_hash(split_key(row.opening), self.spec.split_seed))
        origin = result.layout, row.notes
        self.origins.append(self.known_origins.setdefault(origin, len(self.known_origins)))
        self.batch.append(row)
        self.locations.append((name, result.raw))
        if len(self.batch) == ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        characters = self.spool.append(self.batch)
        self.characters.frombytes(np.minimum(characters, MAX_CHARACTERS).astype(np.uint32).tobytes())
        if self.near_duplicates:
            self.near_duplicates.append(self.batch)
        if self.contamination:
            turns = [compared_texts(row.turns) for row in self.batch]
            locations = [{"file": name, raw.unit: raw.number} for name, raw in self.locations]
            first = len(self.hashes) - len(self.batch)
            self.contamination.append(turns, locations, np.array(self.hashes[first:], np.uint64), first)
        # New lists, because a cleared list would keep its memory.
        self.batch, self.locations = [], []


def _count(names: tuple[str, ...], ignored: Counter[str]) -> None:
    for name in names:
        # Where keys are ids, there may be as many as rows.
        ignored[name if name in ignored or len(ignored) < MAX_NAMES else OTHER_NAMES] += 1


def _log_unread(source: Source, counts: SourceCounts) -> None:
    """Log the columns and keys that aren't read, and the rows that are used although a column marks them as bad."""
    more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
    name = hub_name(source.hub) if source.hub else f"{source.files[0]}{more}"
    if counts.ignored:
        what = f"ignored, because its layout doesn't read them: {_rows_of_each(counts.ignored)}"
        print_line(f"{name}: {what}; to use one, map columns with `fields`")
    if counts.marked:
        what = f"used although a column marks them as bad: {_rows_of_each(counts.marked)}"
        condition = counts.marked.most_common(1)[0][0].replace(": ", " != ", 1)
        print_line(f"{name}: {what}; to drop them, set the source's `where`, for instance `where: {condition}`")


def _rows_of_each(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({n} rows)" for name, n in names.most_common())


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
