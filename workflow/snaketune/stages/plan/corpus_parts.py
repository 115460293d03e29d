"""How a corpus is cut into parts, which are read by a job each: whole files, and ranges of large ones."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from snaketune.config.corpora import Corpus
from snaketune.config.corpus_sources import Source
from snaketune.locations import located, size_of

BYTES_PER_PART, MAX_PARTS = 256_000_000, 128
# The least bytes of a range: its first rows are compared, and those of the file are read once more.
BYTES_PER_RANGE = 16_000_000
# Of files that may be cut. What can't be cut after all, as its content shows, is read whole by the job of its first range.
CUT = (".jsonl", ".ndjson", ".parquet")


class _Unit(NamedTuple):
    """What is read by one job: a source without files, or piece `piece` (from 1) of a file in `pieces`. `size`: in bytes."""

    source: int
    file: str | None
    piece: int
    pieces: int
    size: float


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """The sources that a part has rows of, by their numbers, each with its files in the part; and of each file, the first and
    the last piece that the part has, and the number of all pieces."""

    numbers: tuple[int, ...]
    sources: tuple[Source, ...]
    ranges: tuple[tuple[int, int, int], ...]


def part_count(corpus: Corpus) -> int:
    """The number of parts that a corpus is cut into: at most as many jobs read it, as many tokenize it and write its rows."""
    if corpus.parts:
        return corpus.parts
    size = sum(_size(file) for source in corpus.sources for file in source.files)
    return min(max(1, math.ceil(size / BYTES_PER_PART)), MAX_PARTS)


def cut(corpus: Corpus) -> list[CorpusPart]:
    """The parts that a corpus is read in, in order: one, unless it has several files or a large one."""
    parts = part_count(corpus)
    target = sum(_size(file) for source in corpus.sources for file in source.files) / parts
    units = list(_units(corpus, target))
    total, before = sum(unit.size for unit in units), 0.0
    numbered: list[tuple[int, _Unit]] = []
    for unit in units:
        # By its middle, so that a file that grows a little moves few others.
        numbered.append((min(parts - 1, int((before + unit.size / 2) / total * parts)) if total else 0, unit))
        before += unit.size
    return [_part(corpus, [unit for _, unit in group]) for _, group in groupby(numbered, key=lambda pair: pair[0])]


def _units(corpus: Corpus, target: float) -> Iterator[_Unit]:
    for number, source in enumerate(corpus.sources):
        if not source.files:
            # The size of a Hub dataset isn't known: a part of its own. Scored responses are few.
            yield _Unit(number, None, 1, 1, target if source.hub else 0.0)
        for file in source.files:
            size = _size(file)
            count = min(math.ceil(size / target), size // BYTES_PER_RANGE) if target and file.endswith(CUT) else 1
            pieces = max(1, count)
            for piece in range(1, pieces + 1):
                yield _Unit(number, file, piece, pieces, size / pieces)


def _part(corpus: Corpus, units: list[_Unit]) -> CorpusPart:
    files: dict[int, dict[str, tuple[int, int, int]]] = {}
    for unit in units:
        named = files.setdefault(unit.source, {})
        if unit.file:
            first, *_ = named.get(unit.file, (unit.piece,))
            named[unit.file] = first, unit.piece, unit.pieces
    sources = (corpus.sources[number].model_copy(update={"files": tuple(named)}) for number, named in files.items())
    ranges = tuple(range_ for named in files.values() for range_ in named.values())
    return CorpusPart(numbers=tuple(files), sources=tuple(sources), ranges=ranges)


def _size(file: str) -> int:
    return size_of(located(file))
