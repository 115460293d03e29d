"""The row plan of the `plan` stage: which tokens of which sequence go into which row.

The plan is computed from lengths, and for prompts with several pairs also from ids.

Payload, per split: `<split>-rows.arrow` (the length of each row, and its numbers of segments and pairs), `<split>-pieces.arrow`
(the segments, row after row), for preferences `<split>-pairs.arrow` (the sequence of each pair, and the segments of the row
that its completions end with); `documents.arrow`; and `facts.json`, which the manifest of the shards repeats. The payload
depends only on the sequences and their order, not on the parts in which they were tokenized.

Memory per sequence: some 120 bytes, 200 if rows are wrapped; per pair 450, 650 if prompts have several pairs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import ORDER_COLUMN
from snaketune.engine.packing.best_fit import (
    PackedUnits,
)
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
from snaketune.tables import read_table, write_table
from snaketune.tokenization.token_store import TokenParts

ROWS_PER_BATCH = 2**16
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
    with (
        pa.OSFile(str(work.payload / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, documents_schema(spec.kind, rated)) as documents,
    ):
        for split in SPLITS:
            lengths = parts.index(split, ["length"])["length"]
            read = {"rows": len(lengths), "tokens": pc.sum(lengths).as_py() or 0}
            print(f"planning {split}: {read['rows']} sequences", flush=True)
            keys = _order_keys(spec, split, parts.index(split), corpus)
            rows, counts[split], metadata[split] = plan_split(settings, parts, split, read, keys)
            trees = trees or bool(rows.segments.prefix.any())
            _write(work, split, rows)
            if not raw:
                for batch in _documents(documents_schema(spec.kind, rated), split, rows, parts):
                    documents.write_batch(batch)
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


def _order_keys(spec: PlanSpec, split: str, index: pa.Table, corpus: Artifact | None) -> np.ndarray | None:
    """The numbers by which the train sequences are ordered, int or float[n]; None if their order doesn't count."""
    if spec.order == "shuffled" or split != "train":
        return None
    if spec.order == "length":
        return index["length"].to_numpy()
    if spec.order == "corpus":
        return np.arange(len(index))
    return read_table(corpus.file(f"{split}-{ORDER_COLUMN}.arrow"))[ORDER_COLUMN].to_numpy()


def _write(work: WorkFolder, split: str, rows: PackedUnits) -> None:
    pairs = np.zeros(rows.rows, np.int32) if rows.pair_offsets is None else np.diff(rows.pair_offsets)
    tables = {
        "rows": {"length": rows.capacities, "pieces": np.diff(rows.offsets), "pairs": pairs},
        "pieces": {name: getattr(rows.segments, name) for name in COLUMNS},
    }
    if rows.pairs is not None:
        tables["pairs"] = dict(zip(("sequence", "chosen", "rejected"), rows.pairs.T))
    for name, columns in tables.items():
        table = pa.table({column: pa.array(values, pa.int32()) for column, values in columns.items()})
        write_table(work.payload / f"{split}-{name}.arrow", table, ROWS_PER_BATCH)


def _documents(schema: pa.Schema, split: str, rows: PackedUnits, parts: TokenParts) -> Iterator[pa.RecordBatch]:
    """Yield record batches of `documents.arrow`, in the order of the rows."""
    index = parts.index(split)
    # A split without rows has no margins.
    copied = [name for name in schema.names if name in COPIED and name in index.column_names]
    from_index = {name: index[name].combine_chunks() for name in copied}
    tokens, supervised = rows.segments.tokens, rows.segments.supervised
    if rows.pairs is not None:
        sequence, offsets = rows.pairs[:, 0], rows.pair_offsets
        tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
    else:
        sequence, offsets = rows.segments.sequence[rows.roots], np.searchsorted(rows.roots, rows.offsets)
        if len(sequence):
            tokens, supervised = (np.add.reduceat(values, rows.roots) for values in (tokens, supervised))
    row_of = np.repeat(np.arange(rows.rows, dtype=np.int32), np.diff(offsets))
    for start in range(0, len(sequence), ROWS_PER_BATCH):
        batch = slice(start, start + ROWS_PER_BATCH)
        of = pa.array(sequence[batch])
        columns = {
            "split": pa.repeat(split, len(of)),
            "row": row_of[batch],
            "tokens": tokens[batch],
            "supervised": supervised[batch],
            **{name: column.take(of) for name, column in from_index.items()},
        }
        yield pa.record_batch([pa.array(columns[name]) for name in schema.names], schema=schema)
