"""The row plan of the `plan` stage: which tokens of which sequence go into which row.

The plan is computed from lengths, and for prompts with several pairs also from ids.

Payload, per split: `<split>-rows.arrow` (the length of each row, and its numbers of segments and pairs), `<split>-pieces.arrow`
(the segments, row after row), for preferences `<split>-pairs.arrow` (the sequence of each pair, and the segments of the row
that its completions end with); `documents.arrow`; and `facts.json`, which the manifest of the shards repeats. The payload
depends only on the sequences and their order, not on the parts in which they were tokenized.

Memory per sequence: some 120 bytes, 200 if rows are wrapped; per pair 450, 650 if prompts have several pairs.
"""

from collections.abc import Iterable
from contextlib import ExitStack
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
# The columns of documents are gathered from the index of tokens in at most so many passes, of at least so many documents.
PASSES, DOCUMENTS_PER_PASS = 24, 2**21
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
            _write(
                work, split, rows, None if raw else _Documents(documents, schema, split, parts, rows.units.documents)
            )
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
    lengths = parts.index(split, ["length"])["length"].to_numpy()
    return lengths if spec.order == "length" else np.arange(len(lengths))


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
        if documents is not None:
            documents.finish()


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

    The columns copied from the index of tokens can be larger than memory, and a random read of each document is slow. So
    they are gathered in sequential passes over the index, each for some of the documents.
    """

    def __init__(
        self, writer: pa.RecordBatchFileWriter, schema: pa.Schema, split: str, parts: TokenParts, documents: int
    ):
        self._parts, self._split, self._schema = parts, split, schema
        self._batches = _Batches(writer, schema)
        self._per_pass = max(documents // PASSES, DOCUMENTS_PER_PASS)
        self._found: list[dict[str, np.ndarray]] = []

    def add(self, first: int, rows: PackedUnits) -> None:
        """Add the documents of some rows, of which the first has this number."""
        tokens, supervised = rows.segments.tokens, rows.segments.supervised
        if rows.pairs is not None:
            sequence, offsets = rows.pairs[:, 0], rows.pair_offsets
            tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
        else:
            sequence, offsets = rows.segments.sequence[rows.roots], np.searchsorted(rows.roots, rows.offsets)
            tokens, supervised = (np.add.reduceat(column, rows.roots, dtype=np.int32) for column in (tokens, supervised))
        row = np.repeat(np.arange(first, first + rows.rows, dtype=np.int32), np.diff(offsets))
        self._found.append({"sequence": sequence, "row": row, "tokens": tokens, "supervised": supervised})
        if sum(len(found["row"]) for found in self._found) >= self._per_pass:
            self._write()

    def finish(self) -> None:
        if self._found:
            self._write()
        self._batches.finish()

    def _write(self) -> None:
        columns = {name: np.concatenate([found[name] for found in self._found]) for name in self._found[0]}
        self._found = []
        copied = [name for name in self._schema.names if name in COPIED]
        table, place = self._parts.rows(self._split, copied, columns.pop("sequence"))
        for start in range(0, len(place), ROWS_PER_BATCH):
            batch = slice(start, start + ROWS_PER_BATCH)
            of = pa.array(place[batch])
            found = {name: values[batch] for name, values in columns.items()}
            found |= {name: table[name].take(of).combine_chunks() for name in copied}
            found["split"] = pa.repeat(self._split, len(of))
            self._batches.add(found[name] for name in self._schema.names)
