"""Tokenized parts of a corpus on disk: an index that plans are made from, and the ids, which are only moved.

    <split>-index.arrow   one row per sequence, without its tokens; see INDEX
    <split>-ids.arrow     list of int32, in the same record batches: row i of batch b is the same sequence in both

A conversation is a sequence. A pair is one too, its prompt, its chosen and its rejected completion laid end to end:

    prompt 9 tokens, chosen 4, rejected 5     length 18, prompt 9, chosen 4, learned [9 12 13 17]

Parts laid end to end are the corpus, so sequences are numbered through all parts. Writing and reading keep one record batch
in memory; reading maps the files.
"""

import mmap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.tokenization.ragged import Sequences, first_in_rows, gather, offsets_of

SPLITS = ("train", "held_out")
ROWS_PER_BATCH = 4096
# learned: where loss is taken, as start, end, start, end, ...; never the first token, which nothing predicts.
# turn_ends: after how many tokens a turn of a conversation is over, ascending; nothing for pairs.
# prompt, chosen, prompt_hash: 0 for conversations.
# control_text: whether somebody wrote what looks like a control token.
INDEX = pa.schema(
    [
        ("id", pa.string()),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
        ("learned", pa.list_(pa.int32())),
        ("turn_ends", pa.list_(pa.int32())),
        ("prompt", pa.int32()),
        ("chosen", pa.int32()),
        ("prompt_hash", pa.uint64()),
        ("control_text", pa.bool_()),
    ]
)
# 64-bit offsets: a record batch may have more than 2**31 tokens.
IDS = pa.schema([("ids", pa.large_list(pa.int32()))])


@dataclass(frozen=True)
class TokenRows:
    """n sequences as they are written.

    Attributes:
        names: strings, the ids of the corpus' rows.
        sequences: whose first tokens aren't learned.
        prompt, chosen: int64[n].
        prompt_hash: uint64[n].
        control_text: bool[n].
    """

    names: pa.StringArray
    sequences: Sequences
    prompt: np.ndarray
    chosen: np.ndarray
    prompt_hash: np.ndarray
    control_text: np.ndarray

    @cached_property
    def learned(self) -> tuple[np.ndarray, np.ndarray]:
        """What `learned_runs` gives."""
        return learned_runs(self.sequences)

    @cached_property
    def supervised(self) -> np.ndarray:
        """int64[n]: learned tokens."""
        runs, offsets = self.learned
        return np.diff(offsets_of(runs[1::2] - runs[::2])[offsets // 2])


def of_conversations(names: pa.StringArray, sequences: Sequences, control_text: np.ndarray) -> TokenRows:
    """Rows of n encoded conversations."""
    _first_unlearned(sequences, sequences.starts, sequences.lengths)
    none = np.zeros(len(names), np.int64)
    return TokenRows(names, sequences, none, none, none.astype(np.uint64), control_text)


def of_pairs(names: pa.StringArray, both: Sequences, control_text: np.ndarray) -> TokenRows:
    """Rows of n pairs.

    The prompt is what both conversations of a pair start with, up to the first learned token of either. A pair of which
    one completion has nothing to learn has nothing to learn.

        both    [ 3 90 5 71 2 3 91 5 72 9 2]  and  [ 3 90 5 71 2 3 91 5 72 40 41 2]
        row     [ 3 90 5 71 2 3 91 5 | 72 9 2 | 72 40 41 2],  prompt 8, chosen 3

    Args:
        both: prompt and chosen, prompt and rejected, of each pair in turn; only completions are learned.
        control_text: bool[n].
    """
    starts, lengths = both.starts.reshape(-1, 2), both.lengths.reshape(-1, 2)
    shortest = lengths.min(1)
    prompt = np.minimum(shortest, _first_learned(both).reshape(-1, 2).min(1))
    prompt = np.minimum(prompt, _shared(both.ids, starts, shortest))
    # The chosen conversation whole, then of the rejected one what comes behind the prompt.
    pieces = both.pieces(
        np.stack([starts[:, 0], starts[:, 1] + prompt], 1).reshape(-1),
        np.stack([lengths[:, 0], lengths[:, 1] - prompt], 1).reshape(-1),
    )
    _first_unlearned(pieces, pieces.starts[::2], pieces.lengths[::2])
    alone = np.flatnonzero(prompt == 0)
    _first_unlearned(pieces, pieces.starts[1::2][alone], pieces.lengths[1::2][alone])
    learned = np.diff(offsets_of(pieces.learned)[pieces.offsets]).reshape(-1, 2).min(1) > 0
    offsets = np.ascontiguousarray(pieces.offsets[::2])
    sequences = Sequences(
        pieces.ids,
        offsets,
        pieces.learned & np.repeat(learned, np.diff(offsets)),
        np.zeros(len(pieces.ids), bool),
    )
    spelled = memoryview(np.ascontiguousarray(sequences.ids)).cast("B")
    hashes = [
        xxhash.xxh3_64_intdigest(spelled[4 * start : 4 * end])
        for start, end in zip(sequences.starts.tolist(), (sequences.starts + prompt).tolist())
    ]
    return TokenRows(names, sequences, prompt, lengths[:, 0] - prompt, np.array(hashes, np.uint64), control_text)


def _first_unlearned(sequences: Sequences, starts: np.ndarray, lengths: np.ndarray) -> None:
    """The first token of a sequence has nothing before it to be predicted from."""
    sequences.learned[starts[lengths > 0]] = False


def _first_learned(both: Sequences) -> np.ndarray:
    return first_in_rows(both.learned, both.starts, both.lengths)


def _shared(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[n]: how many leading tokens two sequences of each pair share; `starts` is int64[n, 2], `lengths` int64[n]."""
    at, offsets = gather(starts[:, 0], lengths)
    different = ids[at] != ids[at + np.repeat(starts[:, 1] - starts[:, 0], lengths)]
    return first_in_rows(different, offsets[:-1], lengths)


def learned_runs(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Start, end, start, end, ... of what is learned, per sequence: int32 values and int64[n + 1] offsets."""
    learned = sequences.learned
    starts, ends = learned.copy(), learned.copy()
    starts[1:] &= ~learned[:-1]
    ends[:-1] &= ~learned[1:]
    # A run ends where its sequence does.
    filled = sequences.lengths > 0
    first, last = sequences.starts[filled], sequences.offsets[1:][filled] - 1
    starts[first], ends[last] = learned[first], learned[last]
    runs = np.stack([np.flatnonzero(starts), np.flatnonzero(ends) + 1], 1).reshape(-1)
    offsets = np.searchsorted(runs[::2], sequences.offsets) * 2
    runs -= np.repeat(sequences.starts, np.diff(offsets))
    return runs.astype(np.int32), offsets


def turn_ends(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """After how many tokens a turn is over, per sequence: int32 values and int64[n + 1] offsets."""
    places = np.flatnonzero(sequences.turn_ends)
    offsets = np.searchsorted(places, sequences.offsets)
    return (places + 1 - np.repeat(sequences.starts, np.diff(offsets))).astype(np.int32), offsets


class TokenWriter:
    """Writes one split of a part, batch by batch; use as a context."""

    def __init__(self, folder: Path, split: str):
        self._sinks = [pa.OSFile(str(folder / f"{split}-{part}.arrow"), "wb") for part in ("index", "ids")]
        self._index, self._ids = (pa.ipc.new_file(sink, schema) for sink, schema in zip(self._sinks, (INDEX, IDS)))

    def write(self, rows: TokenRows) -> None:
        """Write sequences behind those before."""
        sequences = rows.sequences
        columns = {
            "id": rows.names,
            "length": pa.array(sequences.lengths.astype(np.int32)),
            "supervised": pa.array(rows.supervised.astype(np.int32)),
            "learned": _list_array(*rows.learned),
            "turn_ends": _list_array(*turn_ends(sequences)),
            "prompt": pa.array(rows.prompt.astype(np.int32)),
            "chosen": pa.array(rows.chosen.astype(np.int32)),
            "prompt_hash": pa.array(rows.prompt_hash),
            "control_text": pa.array(rows.control_text),
        }
        index = pa.record_batch([columns[name] for name in INDEX.names], schema=INDEX)
        ids = pa.LargeListArray.from_arrays(pa.array(sequences.offsets), pa.array(sequences.ids))
        for start in range(0, len(index), ROWS_PER_BATCH):
            self._index.write_batch(index.slice(start, ROWS_PER_BATCH))
            self._ids.write_batch(pa.record_batch([ids.slice(start, ROWS_PER_BATCH)], schema=IDS))

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for closing in (self._index, self._ids, *self._sinks):
            closing.close()


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


@dataclass(frozen=True)
class IdViews:
    """The ids of all sequences of a split, mapped; sequence `first[b] + i` is row i of batch b.

    Attributes:
        values: int32[t] per batch.
        offsets: int64[rows + 1] per batch, into its values.
        first: int64[batches + 1], sequences before each batch, and in all.
    """

    values: list[np.ndarray]
    offsets: list[np.ndarray]
    first: np.ndarray

    def ids(self, number: int) -> np.ndarray:
        """int32[length], a view of one sequence."""
        batch = int(np.searchsorted(self.first, number, side="right")) - 1
        start, end = self.offsets[batch][number - self.first[batch] :][:2]
        return self.values[batch][start:end]


class TokenParts:
    """All parts of a tokenized corpus, in order, read as one. A file's digest is verified when it is first asked for."""

    def __init__(self, parts: list[Artifact]):
        self._parts = parts
        self._maps: dict[tuple[int, str], mmap.mmap] = {}

    def index(self, split: str, columns: list[str] | None = None) -> pa.Table:
        """The index of a split, mapped; `columns` of INDEX, or all."""
        batches = [batch for file in self._open(f"{split}-index.arrow") for batch in _batches(file)]
        table = pa.Table.from_batches(batches, INDEX)
        return table if columns is None else table.select(columns)

    def lists(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists: int32 values laid end to end, and int64[n + 1] offsets."""
        chunks = self.index(split, [name]).column(0).chunks
        values = [chunk.flatten().to_numpy() for chunk in chunks]
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in chunks]
        return (
            np.concatenate([np.zeros(0, np.int32), *values]),
            offsets_of(np.concatenate([np.zeros(0, np.int64), *lengths])),
        )

    def views(self, split: str) -> IdViews:
        """The ids of a split, without a copy."""
        values, offsets = [], []
        for file in self._open(f"{split}-ids.arrow"):
            for batch in _batches(file):
                column = batch.column(0)
                values.append(column.values.to_numpy())
                offsets.append(column.offsets.to_numpy())
        return IdViews(values, offsets, offsets_of(np.array([len(some) - 1 for some in offsets], np.int64)))

    def release(self) -> None:
        """Let the system have back the memory of what was read; what is still viewed is read again from the files."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _open(self, name: str) -> list[mmap.mmap]:
        for number, part in enumerate(self._parts):
            if (number, name) not in self._maps:
                with part.file(name).open("rb") as file:
                    self._maps[number, name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [self._maps[number, name] for number in range(len(self._parts))]


def _batches(file: mmap.mmap) -> list[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(file)))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except pa.ArrowInvalid as error:
        raise SnaketuneError(f"a file of tokens can't be read: {error}") from None
