"""What the first pass wrote of all parts of a corpus, in order, as if it had read the corpus in one part."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.corpus.selecting.row_store import FILE, RowFormat, batches
from snaketune.tables import read_table

RECORDS = pa.schema(
    [("content", pa.uint64()), ("prompt", pa.uint64()), ("characters", pa.uint32()), ("origin", pa.uint32())]
)
ORDER = pa.field("order", pa.float64())
RECORD_FILE, FACTS, QUARANTINE = "records.arrow", "facts.json", "quarantine.jsonl"
MAX_NAMES = 200
OTHER_NAMES = "…"
# Decisions are made of so many rows at once, at some 60 bytes of memory each; and in so many shares at most, since all hashes
# are read for each share.
ROWS_AT_ONCE, MOST_SHARES = 2**24, 16


@dataclass
class SourceCounts:
    """Counts of the raw rows of one source, or of a part of it, by outcome.

    Attributes:
        read: raw rows.
        extra: rows that a raw row gave after its first.
        joined: raw rows that became part of another row.
        rows: valid rows.
        ignored: by column or key (such as `messages[].name`), the used raw rows in which it holds something and isn't read.
        marked: by mark of a bad row, such as `is_correct: false`, the used raw rows that have it.
    """

    read: int = 0
    extra: int = 0
    joined: int = 0
    quarantined: int = 0
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    marked: Counter[str] = field(default_factory=Counter)

    def add(self, counts: dict[str, Any]) -> None:
        """Add the counts of another part of the source, as plain JSON."""
        for name, count in counts.items():
            if isinstance(count, dict):
                getattr(self, name).update(count)
            else:
                setattr(self, name, getattr(self, name) + count)
        limit_names(self.ignored)


def limit_names(counted: Counter[str]) -> None:
    """Count all but the first MAX_NAMES names in alphabetical order as one, so that parts agree about which names these are."""
    for name in sorted(counted.keys() - {OTHER_NAMES})[MAX_NAMES:]:
        counted[OTHER_NAMES] += counted.pop(name)


@dataclass(frozen=True)
class ScannedPart:
    """One part.

    Attributes:
        first: the number of its first row, among the rows of all parts.
        sources: of each of its sources, the number in the corpus.
        offsets: of each range of a file, the lines of the file before it.
    """

    folder: Path
    facts: dict[str, Any]
    first: int
    sources: Sequence[int]
    offsets: list[int]

    @property
    def rows(self) -> slice:
        """Its rows, among those of all parts."""
        return slice(self.first, self.first + self.facts["rows"])

    def column(self, name: str) -> np.ndarray:
        """A column of RECORDS, or ORDER, mapped for as long as it is used."""
        column = read_table(self.folder / RECORD_FILE)[name]
        return column.chunk(0).to_numpy() if column.num_chunks else np.empty(0, column.type.to_pandas_dtype())

    @property
    def rows_by_source(self) -> Iterator[tuple[int, slice]]:
        """The number of each of its sources, and the source's rows in the part."""
        ends = [*accumulate((counts["rows"] for counts in self.facts["sources"]), initial=0)]
        return ((number, slice(*span)) for number, span in zip(self.sources, pairwise(ends)))

    def batches(self, format_: RowFormat, first: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
        return batches(self.folder / FILE, format_, first)

    def located(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with the number of its line in the file, from that in a range of it."""
        if (range_ := record.pop("range", None)) is not None:
            record["line"] += self.offsets[range_]
        return record

    def quarantined(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yield the record of each malformed row, and the repairs that would make the row valid."""
        with (self.folder / QUARANTINE).open(encoding="utf-8") as lines:
            for line in lines:
                record, repairs = json.loads(line)
                yield self.located(record), repairs


class ScannedParts:
    """All parts.

    Attributes:
        sources: counts by source.
        origins: layout and notes of each origin of rows, with its number.
        evaluations: the names of evaluation data that rows were compared with.
        cleaned: as in `Cleaner.counts`.
        ranges: by source and file, what ranges of the file leave to be checked.
    """

    def __init__(self, folders: list[Path], sources: int, sources_of_parts: Sequence[Sequence[int]]):
        """Args: sources: how many the corpus has; sources_of_parts: of each part, the numbers of its sources."""
        self.parts: list[ScannedPart] = []
        self.sources = [SourceCounts() for _ in range(sources)]
        self.origins: dict[tuple[str, tuple[str, ...]], int] = {}
        self.cleaned: Counter[str] = Counter()
        self.ranges: dict[tuple[int, str], list[dict[str, Any]]] = {}
        first, lines = 0, Counter[tuple[int, str]]()
        for folder, numbers in zip(folders, sources_of_parts, strict=True):
            facts, offsets = json.loads((folder / FACTS).read_text(encoding="utf-8")), []
            for range_ in facts["ranges"]:
                key = numbers[range_["source"]], range_["name"]
                offsets.append(lines[key])
                lines[key] += range_["lines"] or 0
                self.ranges.setdefault(key, []).append(range_)
            self.parts.append(ScannedPart(folder, facts, first, numbers, offsets))
            first += facts["rows"]
            for number, counts in zip(numbers, facts["sources"], strict=True):
                self.sources[number].add(counts)
            for layout, notes in facts["origins"]:
                self.origins.setdefault((layout, tuple(notes)), len(self.origins))
            self.cleaned.update(facts["cleaned"])
        self.rows = first
        self.evaluations: list[str] = self.parts[0].facts["evaluations"]

    def __iter__(self) -> Iterator[ScannedPart]:
        return iter(self.parts)

    def format(self, kind: str) -> RowFormat:
        flags = ("weighted", "varied", "rated")
        return RowFormat(kind=kind, **{name: any(part.facts[name] for part in self) for name in flags})

    def column(self, name: str) -> np.ndarray:
        """A column of all rows, in memory if there are several parts."""
        columns = [part.column(name) for part in self]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def by_hash(self, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rows, in order, and their hashes: some ROWS_AT_ONCE, those with the lowest hashes first.

        Rows with equal hashes come together.
        """
        count = min(MOST_SHARES, max(1, -(-self.rows // ROWS_AT_ONCE)))
        for number in range(count):
            low, high = number * 2**64 // count, (number + 1) * 2**64 // count - 1
            rows, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
            for part in self:
                column = part.column(name)
                inside = np.flatnonzero((column >= np.uint64(low)) & (column <= np.uint64(high)))
                rows.append(inside + part.first)
                hashes.append(column[inside])
            yield np.concatenate(rows), np.concatenate(hashes)

    def rows_at(self, numbers: list[int], format_: RowFormat) -> Iterator[dict[str, Any]]:
        """Yield the rows of these numbers, which ascend."""
        numbers = [*numbers]
        for part in self:
            while numbers and numbers[0] < part.rows.stop:
                row = numbers.pop(0) - part.first
                start, batch = next(part.batches(format_, row))
                yield batch.slice(row - start, 1).to_pylist()[0]

    def source_numbers(self, rows: np.ndarray) -> list[slice]:
        """Of each source, the slice of ascending `rows` that are its own."""
        ends = np.searchsorted(rows, [span.start for span in self.rows_of_sources]).tolist()
        return [slice(*span) for span in pairwise([*ends, len(rows)])]

    @property
    def rows_of_sources(self) -> list[slice]:
        """The rows of each source."""
        ends = [*accumulate((counts.rows for counts in self.sources), initial=0)]
        return [slice(*span) for span in pairwise(ends)]
