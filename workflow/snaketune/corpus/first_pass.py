"""The first pass: raw rows to valid, cleaned rows in the spool, and a few numbers about each in memory.

24 bytes of memory per row: the hash of its content, the hash of its prompt, its length, and the number of its origin. All
decisions are made from these after the last row is read.
"""

import gc
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import print_line
from snaketune.corpus.layouts.canonical import canonical_rows
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
from snaketune.errors import SnaketuneError
from snaketune.patterns import TooSlow, search
from snaketune.stages.progress import progress
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


class Scan:
    """Reads every source in turn; call `finish` after the last.

    Attributes:
        hashes, prompt_hashes, characters, origins: for each valid row, the hash of its content, the hash of its prompt, its
            length, and the number of its origin.
        known_origins: layout and notes of each origin, with its number.
    """

    def __init__(
        self,
        spec: CorpusSpec,
        *,
        spool: Spool,
        quarantine: Quarantine,
        cleaner: Cleaner,
        near_duplicates: NearDuplicateSearch | None = None,
        contamination: Contamination | None = None,
    ):
        """Args: near_duplicates, contamination: compare the words of rows, where they are configured."""
        self.spec, self.spool, self.quarantine, self.cleaner = spec, spool, quarantine, cleaner
        self.near_duplicates, self.contamination = near_duplicates, contamination
        self.hashes, self.prompt_hashes = array("Q"), array("Q")
        self.characters, self.origins = array("I"), array("I")
        self.known_origins: dict[tuple[str, tuple[str, ...]], int] = {}
        self.batch: list[Row] = []
        self.locations: list[tuple[str, RawRow]] = []

    def read(self, source: Source, paths: list[Path]) -> SourceCounts:
        """Read all rows of a source.

        Raises:
            SnaketuneError: a file can't be read.
        """
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
        if counts.ignored:
            print_line(_ignored_line(source, counts.ignored))
        if counts.marked:
            print_line(_marked_line(source, counts.marked))
        return counts

    def finish(self) -> None:
        """Write the last batch."""
        if self.batch:
            self._flush()

    def _read(self, name: str, raws: Iterable[RawRow], source: Source, counts: SourceCounts) -> None:
        seed, pattern = self.spec.split_seed, self.spec.answer_pattern
        clean = self.cleaner.clean if self.cleaner.active else None
        hashes, prompt_hashes, origins, known = self.hashes, self.prompt_hashes, self.origins, self.known_origins
        results, read = 0, counts.read
        counted = _count_raws(progress(raws, name, "rows"), counts)
        for result in _with_file_name(
            name, canonical_rows(counted, kind=self.spec.kind, source=source, repair=self.spec.repair)
        ):
            results += 1
            row = result.row
            if row is None:
                counts.joined += 1
                _count(result.ignored, counts.ignored)
                continue
            try:
                if isinstance(row, Malformed | Dropped):
                    raise row
                if result.raw.notes:
                    row.notes += result.raw.notes
                if clean:
                    row = clean(row)
                if pattern and row.answer is None:
                    _find_answer(row, pattern)
                content = content_hash(row)
            except TooSlow as error:
                raise SnaketuneError(f"{name}, {result.raw.unit} {result.raw.number}: {error}") from None
            except Malformed as error:
                self.quarantine.add(name, result.raw, error)
                counts.quarantined += 1
                continue
            except Dropped as error:
                counts.dropped[error.reason] += 1
                continue
            _count(result.ignored, counts.ignored)
            _count(result.marks, counts.marked)
            hashes.append(content)
            prompt_hashes.append(prompt_hash(split_key(row.opening), seed))
            origin = result.layout, row.notes
            origins.append(known[origin] if origin in known else known.setdefault(origin, len(known)))
            self.batch.append(row)
            self.locations.append((name, result.raw))
            if len(self.batch) == ROWS_PER_BATCH:
                self._flush()
        counts.extra += results - (counts.read - read)

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


def _source_name(source: Source) -> str:
    more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
    return hub_name(source.hub) if source.hub else f"{source.files[0]}{more}"


def _rows_of_each(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({n} rows)" for name, n in names.most_common())


def _ignored_line(source: Source, ignored: Counter[str]) -> str:
    """Describe the columns and keys of a source that aren't read."""
    return (
        f"{_source_name(source)}: ignored, because its layout doesn't read them: {_rows_of_each(ignored)}; to use one, "
        "map columns with `fields`"
    )


def _marked_line(source: Source, marked: Counter[str]) -> str:
    """Describe the rows of a source that are used although a column marks them as bad, and how to drop them."""
    column, _, value = marked.most_common(1)[0][0].partition(": ")
    return (
        f"{_source_name(source)}: used although a column marks them as bad: {_rows_of_each(marked)}; to drop them, "
        f"set the source's `where`, for instance `where: {column} != {value}`"
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often: rows hold no reference cycles, and a collection per batch costs a tenth."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _with_file_name(name: str, rows: Iterable[RowResult]) -> Iterator[RowResult]:
    """Yield `rows`; add the name of the file to errors about the file as a whole."""
    try:
        yield from rows
    except Malformed as error:
        raise SnaketuneError(f"{name}: {error.detail}") from None


def _count_raws(raws: Iterable[RawRow], counts: SourceCounts) -> Iterator[RawRow]:
    for raw in raws:
        counts.read += 1
        yield raw


def _find_answer(row: Row, pattern: str) -> None:
    match = search(pattern, row.reply)
    row.answer = ((match and match[1]) or "").strip() or None
    if row.answer is None:
        row.notes += ("no_answer",)
