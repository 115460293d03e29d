"""The `write` stage: some of the shards, from the plan.

The tokens of a row lie all over the tokenized parts. They are copied slice by slice out of the mapped files, a batch of
rows at a time, and pages that aren't needed any more are let go, so that memory stays at some hundred MB whatever the size of
the corpus. Shards that a killed attempt had finished are kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.tables import read_table
from snaketune.artifacts.work import WorkFolder
from snaketune.config.specs import WriteSpec
from snaketune.packing.pieces import COLUMNS, Pieces
from snaketune.packing.shards import (
    FORMAT_VERSION,
    IGNORED,
    SPLITS,
    TOKENS_PER_BATCH,
    TOKENS_PER_SHARD,
    row_batch,
    schema,
    shard_name,
)
from snaketune.progress import progress
from snaketune.tokenization.tokens import TokenParts

RAW_ROWS_PER_BATCH = 1024


class Shard(NamedTuple):
    """Rows `first` to `last` (not included) of a split, all of `length` tokens."""

    split: str
    number: int
    length: int
    first: int
    last: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


def build(
    spec: WriteSpec, work: WorkFolder, *, plan: Artifact, tokens: list[Artifact], corpus: list[Artifact]
) -> Outcome:
    """Fill `work.payload` with this part's shards.

    Args:
        tokens: the parts of the tokenized corpus, in order.
        corpus: the corpus itself, for raw rows; else nothing.
    Raises:
        SnaketuneError: a damaged input.
    """
    shards = list(_shards(plan))
    own = shards[len(shards) * (spec.part - 1) // spec.parts : len(shards) * spec.part // spec.parts]
    packed = plan.manifest["format_version"] == FORMAT_VERSION
    source = _PackedRows(plan, TokenParts(tokens)) if packed else _RawRows(plan, corpus[0])
    finished = work.state / "shards"
    finished.mkdir(parents=True, exist_ok=True)
    for shard in progress(own, "writing", "shards", len(own)):
        path = finished / shard.name
        if not path.exists():
            partial = path.with_suffix(".partial")
            source.write(shard, partial)
            partial.rename(path)
    for shard in own:
        (finished / shard.name).rename(work.payload / shard.name)
    return Outcome(counts={"shards": len(own), "rows": sum(s.last - s.first for s in own)}, libraries=("pyarrow",))


def _shards(plan: Artifact) -> Iterator[Shard]:
    """All shards of a plan: rows of one length, as many as make some 300 MB."""
    for split in SPLITS:
        lengths = read_table(plan.file(f"{split}-rows.arrow"))["length"].to_numpy()
        number = 0
        for length, first, rows in zip(*np.unique(lengths, return_index=True, return_counts=True), strict=True):
            length, first, last = int(length), int(first), int(first + rows)
            step = max(1, TOKENS_PER_SHARD // length)
            for start in range(first, last, step):
                yield Shard(split, number, length, start, min(start + step, last))
                number += 1


class _Plan:
    """The plan of a split, as arrays."""

    def __init__(self, plan: Artifact, split: str):
        rows = read_table(plan.file(f"{split}-rows.arrow"))
        self.starts = np.concatenate([[0], np.cumsum(rows["pieces"].to_numpy(), dtype=np.int64)])
        self.table = read_table(plan.file(f"{split}-pieces.arrow"))

    def pieces(self, first: int, last: int) -> tuple[Pieces, np.ndarray]:
        """The pieces of rows `first` to `last`, and where each row's begin among them."""
        start, stop = int(self.starts[first]), int(self.starts[last])
        table = self.table.slice(start, stop - start)
        pieces = Pieces(**{name: table[name].to_numpy() for name in COLUMNS})
        return pieces, self.starts[first : last + 1] - start


class _PackedRows:
    def __init__(self, plan: Artifact, parts: TokenParts):
        self.plan, self.parts = plan, parts
        self.pad_id = plan.manifest["padding_id"]
        self.splits: dict[str, _Sequences] = {}

    def write(self, shard: Shard, path: Path) -> None:
        if shard.split not in self.splits:
            self.splits = {shard.split: _Sequences(_Plan(self.plan, shard.split), self.parts, shard.split)}
        sequences = self.splits[shard.split]
        step = max(1, TOKENS_PER_BATCH // shard.length)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema(shard.length)) as writer:
            for first in range(shard.first, shard.last, step):
                last = min(first + step, shard.last)
                writer.write_batch(sequences.rows(first, last, shard.length, self.pad_id))


class _Sequences:
    """Where the sequences of a split are, and where they are learned."""

    def __init__(self, plan: _Plan, parts: TokenParts, split: str):
        self.plan, self.parts = plan, parts
        views = parts.views(split)
        self.values = views.values
        # Per sequence: the batch that holds it, and where it begins there.
        self.batch = np.repeat(np.arange(len(views.values), dtype=np.int32), np.diff(views.first))
        self.begin = np.concatenate([np.empty(0, np.int64), *(offsets[:-1] for offsets in views.offsets)])
        self.runs, self.run_starts = parts.lists(split, "learned")

    def rows(self, first: int, last: int, length: int, pad_id: int) -> pa.RecordBatch:
        """Rows `first` to `last` of the plan."""
        pieces, starts = self.plan.pieces(first, last)
        row_of = np.repeat(np.arange(last - first), np.diff(starts))
        tokens = pieces.tokens.astype(np.int64)
        ends = np.cumsum(tokens)
        fill = np.diff(np.concatenate([[0], ends])[starts])
        # Where each piece begins in its block of rows.
        padding = np.concatenate([[0], np.cumsum(length - fill)])[:-1]
        places = ends - tokens + padding[row_of]
        ids = self._copied(pieces, row_of, fill, length, pad_id)
        return row_batch(ids, self._labels(pieces, places, ids), fill, *_segments(pieces, starts))

    def _copied(self, pieces: Pieces, row_of: np.ndarray, fill: np.ndarray, length: int, pad_id: int) -> np.ndarray:
        """int32[R, L]: the tokens of the pieces, and padding behind each row's last."""
        rows = len(fill)
        batch, begin = self.batch[pieces.sequence], self.begin[pieces.sequence]
        parts = [(batch, begin + pieces.start, begin + pieces.stop, row_of)]
        if pieces.second_stop.any():
            parts.append((batch, begin + pieces.second_start, begin + pieces.second_stop, row_of))
        # In the order of the rows: first halves and second halves in turn, and padding as one more slice of each row.
        slices = [np.stack(columns, axis=1).reshape(-1) for columns in zip(*parts, strict=True)]
        nowhere = len(self.values)
        pads = [np.full(rows, nowhere), np.zeros(rows, np.int64), length - fill, np.arange(rows)]
        *columns, row = (np.concatenate(both) for both in zip(slices, pads, strict=True))
        order = np.argsort(row, kind="stable")
        blocks = [*self.values, np.full(length, pad_id, np.int32)]
        out = np.empty(rows * length, np.int32)
        np.concatenate([blocks[b][s:e] for b, s, e in zip(*(column[order].tolist() for column in columns))], out=out)
        self.parts.release()
        return out.reshape(rows, length)

    def _labels(self, pieces: Pieces, places: np.ndarray, ids_RL: np.ndarray) -> np.ndarray:
        """int32[R, L]: the tokens where loss is taken, else -100."""
        counts = (self.run_starts[pieces.sequence + 1] - self.run_starts[pieces.sequence]) // 2
        of = np.repeat(np.arange(len(pieces)), counts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = self.run_starts[pieces.sequence[of]] + 2 * nth
        begin, end = self.runs[at], self.runs[at + 1]
        # The first token of a segment without a prefix has nothing to be predicted from.
        lone = (pieces.start == 0) | (pieces.prefix == 0)
        halves = [(pieces.start + lone, pieces.stop, places - pieces.start)]
        if pieces.second_stop.any():
            shift = places + pieces.stop - pieces.start - pieces.second_start
            halves.append((pieces.second_start + (pieces.prefix == 0), pieces.second_stop, shift))
        starts, stops = [], []
        for low, high, shift in halves:
            start, stop = np.maximum(begin, low[of]), np.minimum(end, high[of])
            some = start < stop
            starts.append((start + shift[of])[some])
            stops.append((stop + shift[of])[some])
        start, stop = np.sort(np.concatenate(starts)), np.sort(np.concatenate(stops))
        # As slices in turn: what isn't learned, from one run's end to the next one's start, and what is.
        gaps = np.append(start, ids_RL.size) - np.append(0, stop)
        tokens, ignored = ids_RL.reshape(-1), np.full(int(gaps.max()), IGNORED, np.int32)
        slices = [ignored[: gaps[0]]]
        for s, e, gap in zip(start.tolist(), stop.tolist(), gaps[1:].tolist()):
            slices += (tokens[s:e], ignored[:gap])
        return np.concatenate(slices).reshape(ids_RL.shape)


def _segments(pieces: Pieces, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row its segments: where they begin among all, their lengths, their prefixes."""
    first = pieces.stop - pieces.start
    if not pieces.second_stop.any():
        return starts, first, np.zeros(len(pieces), np.int32)
    second = pieces.second_stop - pieces.second_start
    shared = np.where(pieces.start > 0, pieces.prefix, 0)
    return starts * 2, np.stack([first, second], 1).reshape(-1), np.stack([shared, pieces.prefix], 1).reshape(-1)


class _RawRows:
    """Rows of the corpus as they are (format v2.0), for TRL's trainer to tokenize."""

    def __init__(self, plan: Artifact, corpus: Artifact):
        self.plan, self.corpus = plan, corpus

    def write(self, shard: Shard, path: Path) -> None:
        table = read_table(self.corpus.file(f"{shard.split}.arrow"))
        pieces, _ = _Plan(self.plan, shard.split).pieces(shard.first, shard.last)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            for start in range(0, len(pieces), RAW_ROWS_PER_BATCH):
                writer.write_table(table.take(pieces.sequence[start : start + RAW_ROWS_PER_BATCH]))
