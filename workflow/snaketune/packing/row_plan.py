"""The row plan of the `plan` stage: which tokens of which sequence go into which row.

The plan is computed from lengths, and for prompts with several pairs also from ids.

Payload, per split: `<split>-rows.arrow` (the length of each row, and its numbers of segments and pairs), `<split>-pieces.arrow`
(the segments, row after row), for preferences `<split>-pairs.arrow` (the sequence of each pair, and the segments of the row
that its completions end with); `documents.arrow`; and `facts.json`, which the manifest of the shards repeats. The payload
depends only on the sequences and their order, not on the parts in which they were tokenized.

Memory per sequence: some 120 bytes, 200 if rows are wrapped; per pair 450, 650 if prompts have several pairs.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import ORDER_COLUMN
from snaketune.engine.packing.packed_units import PackedUnits, SplitPlan
from snaketune.engine.packing.planned_segments import COLUMNS
from snaketune.engine.packing.planner import plan_split
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.shards import (
    COPIED,
    FORMAT_VERSIONS,
    RAW_FORMAT_VERSION,
    SPLITS,
    TREE_VERSION,
    WEIGHTED_VERSION,
    documents_schema,
)
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PlanSpec
from snaketune.tables import read_table
from snaketune.tokenization.token_store import TokenParts

ROWS_PER_BATCH = 2**16
# Of sequences and of documents, each of which is in memory as a whole: at most so many, of at least so many.
RANGES, LEAST_RANGE = 32, 2**21
FACTS = "facts.json"


def plan_rows(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact], corpus: Artifact | None = None) -> Outcome:
    """Write the row plan of a tokenized corpus, given by its parts in order, to `work.payload`.

    Args:
        corpus: the corpus, if its rows are ordered by a column.

    Raises:
        SnaketuneError: a sequence longer than a row, and `overflow` is `raise`; a split of which no row can be packed.
    """
    parts, settings = TokenParts(tokens), PackingSettings(**spec.model_dump())
    raw = spec.strategy == "none"
    counts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    trees, rated = False, any(parts.rated(split) for split in SPLITS)
    schema = documents_schema(spec.kind, rated)
    with (
        pa.OSFile(str(work.payload / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, schema) as documents,
    ):
        for split in SPLITS:
            read = {"rows": 0, "tokens": 0}
            for table in parts.tables(split, ["length"]):
                read["rows"] += len(table)
                read["tokens"] += pc.sum(table["length"]).as_py()
            print(f"planning {split}: {read['rows']} sequences", flush=True)
            keys = _order_keys(spec, split, parts, corpus)
            rows, counts[split], metadata[split] = plan_split(settings, parts, split, read, keys)
            trees = trees or rows.units.has_prefixes
            most = max(read["rows"], rows.units.documents)
            of_rows = None if raw else _Documents(work.state / split, documents, schema, split, parts, most)
            _write(work, split, rows, of_rows)
            del rows
            if of_rows is not None:
                of_rows.finish()
    version = TREE_VERSION if trees else FORMAT_VERSIONS[spec.kind][0]
    if spec.kind == "sft" and any(parts.weighted(split) for split in SPLITS):
        version = WEIGHTED_VERSION
    facts = {
        "format_version": RAW_FORMAT_VERSION if raw else version,
        "kind": spec.kind,
        "row_length": spec.lengths[-1],
        "packing_metadata": metadata["train"],
        "packing_metadata_held_out": metadata["held_out"],
        "padding_id": tokens[0].manifest["pad_id"],
    } | ({"order": spec.order} if spec.order != "shuffled" else {})
    # `pack` repeats the counts in its manifest, so they have to be part of the content of the plan.
    write_json(work.payload / FACTS, {"about": facts, "counts": counts})
    return Outcome(counts=counts, about=facts)


def _order_keys(spec: PlanSpec, split: str, parts: TokenParts, corpus: Artifact | None) -> np.ndarray | None:
    """The numbers by which the train sequences are ordered, int or float[n]; None if their order doesn't count."""
    if spec.order == "shuffled" or split != "train":
        return None
    if spec.order == "column":
        return read_table(corpus.file(f"{split}-{ORDER_COLUMN}.arrow"))[ORDER_COLUMN].to_numpy()
    lengths = [np.zeros(0, np.int32), *(table["length"].to_numpy() for table in parts.tables(split, ["length"]))]
    keys = np.concatenate(lengths)
    return keys if spec.order == "length" else np.arange(len(keys), dtype=np.int32)


def _write(work: WorkFolder, split: str, rows: SplitPlan, documents: "_Documents | None") -> None:
    """Write the rows, segments and pairs of a split, and its documents if there are any, a batch of rows at a time."""
    names = {"rows": ("length", "pieces", "pairs"), "pieces": COLUMNS}
    if rows.units.pairs is not None:
        names["pairs"] = ("sequence", "chosen", "rejected")
    with ExitStack() as stack:
        tables = {}
        for name, columns in names.items():
            schema = pa.schema([(column, pa.int32()) for column in columns])
            file = stack.enter_context(pa.OSFile(str(work.payload / f"{split}-{name}.arrow"), "wb"))
            tables[name] = _Batches(stack.enter_context(pa.ipc.new_file(file, schema)), schema)
        for first, packed in rows.batches():
            pairs = np.zeros(packed.rows, np.int32) if packed.pair_offsets is None else np.diff(packed.pair_offsets)
            tables["rows"].add([packed.capacities, np.diff(packed.offsets), pairs])
            tables["pieces"].add([getattr(packed.segments, name) for name in COLUMNS])
            if packed.pairs is not None:
                tables["pairs"].add(packed.pairs.T)
            if documents is not None:
                documents.add(first, packed)
        for table in tables.values():
            table.finish()


class _Batches:
    """Writes columns of any length as record batches of ROWS_PER_BATCH rows, of which the last has the rest."""

    def __init__(self, writer: pa.RecordBatchFileWriter, schema: pa.Schema):
        self._writer, self._schema, self._rest = writer, schema, schema.empty_table()

    def add(self, columns: Iterable[np.ndarray | pa.Array]) -> None:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
        table = pa.concat_tables([self._rest, pa.Table.from_arrays(arrays, schema=self._schema)])
        whole = len(table) // ROWS_PER_BATCH * ROWS_PER_BATCH
        if whole:
            table = table.combine_chunks()
            self._writer.write_table(table.slice(0, whole), max_chunksize=ROWS_PER_BATCH)
        self._rest = table.slice(whole)

    def finish(self) -> None:
        self._writer.write_table(self._rest.combine_chunks())


class _Documents:
    """Writes the documents of a split to `documents.arrow`, in the order of the rows.

    What is copied from the index of tokens can be larger than memory, and reading it document by document is slow. So
    documents are first divided by ranges of sequences, each of which is read at once, then by ranges of documents:

        sequences/<n>   the documents with sequences in range n, in order
        documents/<n>   the documents in range n, complete, by range of sequences
    """

    def __init__(
        self,
        folder: Path,
        writer: pa.RecordBatchFileWriter,
        schema: pa.Schema,
        split: str,
        parts: TokenParts,
        most: int,
    ):
        """Args: folder: for temporary files; most: the number of sequences or documents, whichever is higher."""
        self._parts, self._split, self._schema = parts, split, schema
        self._batches, self._documents = _Batches(writer, schema), 0
        self._each = max(-(-most // RANGES), LEAST_RANGE)
        self._by_sequence, self._by_document = (
            _Ranges(folder / name, self._each, most) for name in ("sequences", "documents")
        )

    def add(self, first: int, rows: PackedUnits) -> None:
        """Add the documents of some rows, of which the first has this number."""
        tokens, supervised = rows.segments.tokens, rows.segments.supervised
        if rows.pairs is not None:
            sequence, offsets = rows.pairs[:, 0], rows.pair_offsets
            tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
        else:
            roots = rows.roots
            sequence, offsets = rows.segments.sequence[roots], np.searchsorted(roots, rows.offsets)
            tokens, supervised = (np.add.reduceat(column, roots, dtype=np.int32) for column in (tokens, supervised))
        row = np.repeat(np.arange(first, first + rows.rows, dtype=np.int32), np.diff(offsets))
        document = np.arange(self._documents, self._documents + len(row), dtype=np.int32)
        self._documents += len(row)
        columns = {"sequence": sequence, "document": document, "row": row, "tokens": tokens, "supervised": supervised}
        self._by_sequence.add("sequence", pa.record_batch(columns))

    def finish(self) -> None:
        """Write all documents; the plan isn't needed in memory any more."""
        copied = [name for name in self._schema.names if name in COPIED]
        for number, index in enumerate(self._parts.ranges(self._split, copied, self._each)):
            for batch in self._by_sequence.read(number):
                at = pc.subtract(batch["sequence"], number * self._each)
                columns = {name: batch[name] for name in ("document", "row", "tokens", "supervised")}
                columns |= {name: index[name].take(at).combine_chunks() for name in copied}
                self._by_document.add("document", pa.record_batch(columns))
        for number in range(-(-self._documents // self._each)):
            table = pa.Table.from_batches(list(self._by_document.read(number))).combine_chunks()
            order = np.empty(len(table), np.int32)
            order[table["document"].to_numpy() - number * self._each] = np.arange(len(table), dtype=np.int32)
            for start in range(0, len(table), ROWS_PER_BATCH):
                batch = table.take(pa.array(order[start : start + ROWS_PER_BATCH]))
                batch = batch.append_column("split", pa.repeat(self._split, len(batch)))
                self._batches.add(batch[name].combine_chunks() for name in self._schema.names)
        self._batches.finish()


class _Ranges:
    """Record batches divided by a column of numbers into ranges of `each` numbers; in files if there are several ranges."""

    def __init__(self, folder: Path, each: int, most: int):
        self._folder, self._each, self._in_memory = folder, each, most <= each
        self._batches: list[pa.RecordBatch] = []
        self._files: dict[int, Any] = {}

    def add(self, column: str, batch: pa.RecordBatch) -> None:
        if self._in_memory:
            self._batches.append(batch)
            return
        number = (batch[column].to_numpy() // self._each).astype(np.uint16)
        order = np.argsort(number, kind="stable")
        numbers, counts = np.unique(number, return_counts=True)
        batch, start = batch.take(pa.array(order)), 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[number] = pa.ipc.new_stream(str(self._folder / str(number)), batch.schema)
            self._files[number].write_batch(batch.slice(start, count))
            start += count

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a range, in the order in which they were added, and remove them."""
        if self._in_memory:
            yield from self._batches
        elif number in self._files:
            self._files.pop(number).close()
            path = self._folder / str(number)
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                yield from reader
            path.unlink()
