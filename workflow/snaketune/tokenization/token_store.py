"""Tokenized parts of a corpus on disk: an index, from which rows are planned, and the ids, which are only copied.

    <split>-index.arrow   one row per sequence, without its tokens; see INDEX
    <split>-ids.arrow     list of int32, in the same record batches: row i of batch b is the same sequence in both

A sequence is a conversation, a prompt with a labelled completion, or a pair: its prompt, chosen and rejected completion,
concatenated:

    prompt 9 tokens, chosen 4, rejected 5     length 18, prompt 9, chosen 4, supervised_runs [9 12 13 17]

The concatenated parts are the corpus, so sequences are numbered through all parts. Files are memory-mapped for reading.
"""

import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.engine.packing.ragged import offsets_of
from snaketune.engine.packing.tokens import IdViews
from snaketune.errors import SnaketuneError
from snaketune.tokenization.token_rows import TokenRows

SPLITS = ("train", "held_out")
ROWS_PER_BATCH = 4096
# Batches of the index that are read at once.
BATCHES_PER_TABLE = 16
# supervised_runs: the tokens where loss is taken, as start, end, start, end, ...; never the first, which nothing predicts.
# turn_ends: the ends of a conversation's turns, in tokens, ascending; empty for pairs.
# branches: of a conversation that is a tree, start, prefix, parent of each branch (see `encode_rows`); else empty.
# prompt, chosen: tokens of the prompt and of the chosen (or labelled) completion; 0 for conversations.
# common: leading tokens of both completions of a pair that are equal in id and supervision; else 0.
# prompt_hash: equal for equal prompts; 0 for conversations.
# label: whether a labelled completion is good; else null.
# source: the number of the row's source in its corpus.
# control_text: whether the row contains the string of a control token.
INDEX = pa.schema(
    {
        "id": pa.string(),
        "length": pa.int32(),
        "supervised": pa.int32(),
        "supervised_runs": pa.list_(pa.int32()),
        "turn_ends": pa.list_(pa.int32()),
        "branches": pa.list_(pa.int32()),
        "prompt": pa.int32(),
        "chosen": pa.int32(),
        "common": pa.int32(),
        "prompt_hash": pa.uint64(),
        "label": pa.bool_(),
        "source": pa.int16(),
        "control_text": pa.bool_(),
    }
)
# The weight of each supervised run, if a corpus has other weights than 0 and 1; and of pairs, if a corpus has ratings, by how
# much the chosen completion is rated higher.
RUN_WEIGHTS, MARGIN = pa.field("run_weights", pa.list_(pa.float32())), pa.field("margin", pa.float64())
# 64-bit offsets: a record batch may have more than 2**31 tokens.
IDS = pa.schema([("ids", pa.large_list(pa.int32()))])


def index_schema(weighted: bool, rated: bool) -> pa.Schema:
    """INDEX, with the weights of supervised runs and the margins of pairs where a corpus has them."""
    return pa.schema([*INDEX, *([RUN_WEIGHTS] if weighted else []), *([MARGIN] if rated else [])])


class TokenWriter(ExitStack):
    """Writes one split of a part, batch by batch; with weights and margins if the corpus has them."""

    def __init__(self, folder: Path, split: str, weighted: bool = False, rated: bool = False):
        super().__init__()
        self._schema = index_schema(weighted, rated)
        self._index, self._ids = (
            self.enter_context(pa.ipc.new_file(str(folder / f"{split}-{part}.arrow"), schema))
            for part, schema in (("index", self._schema), ("ids", IDS))
        )

    def write(self, rows: TokenRows) -> None:
        sequences = rows.sequences
        columns = {
            "id": rows.names,
            "length": sequences.lengths.astype(np.int32),
            "supervised": rows.supervised_tokens.astype(np.int32),
            "supervised_runs": _list_array(*rows.supervised_runs),
            "turn_ends": _list_array(*rows.turn_ends),
            "branches": _list_array(*rows.branches),
            "prompt": rows.prompt.astype(np.int32),
            "chosen": rows.chosen.astype(np.int32),
            "common": rows.common.astype(np.int32),
            "prompt_hash": rows.prompt_hash,
            "label": rows.label,
            "source": pa.nulls(len(rows.names), pa.int16()) if rows.source is None else rows.source,
            "control_text": rows.control_text,
        }
        if RUN_WEIGHTS in self._schema:
            columns[RUN_WEIGHTS.name] = _list_array(*rows.run_weights)
        if MARGIN in self._schema:
            columns[MARGIN.name] = pa.nulls(len(rows.names), pa.float64()) if rows.margin is None else rows.margin
        index = pa.record_batch(columns, schema=self._schema)
        ids = pa.LargeListArray.from_arrays(pa.array(sequences.offsets), pa.array(sequences.ids))
        for start in range(0, len(index), ROWS_PER_BATCH):
            self._index.write_batch(index.slice(start, ROWS_PER_BATCH))
            self._ids.write_batch(pa.record_batch([ids.slice(start, ROWS_PER_BATCH)], schema=IDS))


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


class TokenParts:
    """All parts of a tokenized corpus, in order, read as one. The digest of a file is verified when it is first opened."""

    def __init__(self, parts: list[Artifact]):
        self._parts = parts
        self._maps: dict[tuple[int, str], mmap.mmap] = {}

    def index(self, split: str, columns: list[str] | None = None) -> pa.Table:
        """The memory-mapped index of a split, with all columns of INDEX or the given ones."""
        batches = [batch for reader in self._indexes(split, columns) for batch in _batches(reader)]
        table = pa.Table.from_batches(batches, batches[0].schema if batches else INDEX)
        return table if columns is None else table.select(columns)

    def tables(self, split: str, columns: list[str]) -> Iterator[pa.Table]:
        """Yield the index in order, some ten thousand sequences at a time; pages that were read are released."""
        for reader in self._indexes(split, columns):
            for first in range(0, reader.num_record_batches, BATCHES_PER_TABLE):
                last = min(first + BATCHES_PER_TABLE, reader.num_record_batches)
                yield pa.Table.from_batches([reader.get_batch(number) for number in range(first, last)])
                self.release()

    def ranges(self, split: str, columns: list[str], sequences: int) -> Iterator[pa.Table]:
        """Yield copies of the index in order, of so many sequences each; the last has the rest."""
        found, rows = [], 0
        for table in self.tables(split, columns):
            found.append(table.combine_chunks())
            rows += len(table)
            while rows >= sequences:
                yield pa.concat_tables(found).slice(0, sequences).combine_chunks()
                rows -= sequences
                # What is left is the end of the last table.
                found = [found[-1].slice(len(found[-1]) - rows)]
        if rows:
            yield pa.concat_tables(found).combine_chunks()

    def weighted(self, split: str) -> bool:
        """Whether the supervised runs of a split have weights."""
        return self._has(split, RUN_WEIGHTS)

    def rated(self, split: str) -> bool:
        """Whether the pairs of a split have ratings."""
        return self._has(split, MARGIN)

    def _has(self, split: str, field: pa.Field) -> bool:
        return any(reader.num_record_batches and field in reader.schema for reader in self._indexes(split))

    def _indexes(self, split: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatchFileReader]:
        """Yield the readers of a split's index by part, of all columns or of the given ones."""
        schemas = [index_schema(weighted, rated) for weighted in (False, True) for rated in (False, True)]
        for file in self._open(f"{split}-index.arrow"):
            reader = _reader(file)
            if reader.num_record_batches and reader.schema not in schemas:
                manifest = self._parts[0].manifest_path
                raise SnaketuneError(
                    f"{manifest}: tokens of another version, with the columns {', '.join(reader.schema.names)}, expected "
                    f"{', '.join(INDEX.names)}; rebuild them with: {rebuild_command(manifest)}"
                )
            yield reader if columns is None else _reader(file, [reader.schema.names.index(name) for name in columns])

    def lists(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists as int32 or float32 values, concatenated, and int64[n + 1] offsets."""
        chunks = self.index(split, [name]).column(0).chunks
        values = [chunk.flatten().to_numpy() for chunk in chunks] or [np.zeros(0, np.int32)]
        lengths = [np.zeros(0, np.int64), *(np.diff(chunk.offsets.to_numpy()) for chunk in chunks)]
        lists = np.concatenate(values), offsets_of(np.concatenate(lengths))
        self.release()
        return lists

    def views(self, split: str) -> IdViews:
        columns = [batch.column(0) for file in self._open(f"{split}-ids.arrow") for batch in _batches(_reader(file))]
        offsets = [column.offsets.to_numpy() for column in columns]
        first = offsets_of(np.array([len(column) for column in columns], np.int64))
        return IdViews([column.values.to_numpy() for column in columns], offsets, first)

    def release(self) -> None:
        """Release the memory of mapped pages; views stay valid and read the pages again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _open(self, name: str) -> list[mmap.mmap]:
        for number, part in enumerate(self._parts):
            if (number, name) not in self._maps:
                with part.file(name).open("rb") as file:
                    self._maps[number, name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return [self._maps[number, name] for number in range(len(self._parts))]


def _batches(reader: pa.RecordBatchFileReader) -> list[pa.RecordBatch]:
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _reader(file: mmap.mmap, fields: list[int] | None = None) -> pa.RecordBatchFileReader:
    try:
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(file)), options=options)
    except pa.ArrowInvalid as error:
        raise SnaketuneError(f"a token file can't be read: {error}") from None
