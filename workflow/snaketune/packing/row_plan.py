"""The row plan of the `plan` stage: which tokens of which sequence go into which row.

The plan is computed from lengths, and for prompts with several pairs also from ids.

Payload, per split: `<split>-rows.arrow` (the length of each row, and its numbers of segments and pairs), `<split>-pieces.arrow`
(the segments, row after row), for preferences `<split>-pairs.arrow` (the sequence of each pair, and the segments of the row
that its completions end with); `documents.arrow`; and `facts.json`, which the manifest of the shards repeats. The payload
depends only on the sequences and their order, not on the parts in which they were tokenized.

Memory: that of the planner, 16 bytes per conversation (`engine.packing.planner`); all else is written batch by batch.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import ORDER_COLUMN
from snaketune.engine.packing.packed_units import SplitPlan
from snaketune.engine.packing.planned_segments import COLUMNS
from snaketune.engine.packing.planner import plan_split
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.shards import (
    FORMAT_VERSIONS,
    RAW_FORMAT_VERSION,
    SPLITS,
    TREE_VERSION,
    WEIGHTED_VERSION,
    documents_schema,
)
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.packing.document_writer import ROWS_PER_BATCH, DocumentWriter
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PlanSpec
from snaketune.tables import BatchWriter, read_table
from snaketune.tokenization.token_store import TokenParts

FACTS = "facts.json"
# Sequences and documents have numbers of 32 bits.
MOST_SEQUENCES = 2**31


def build(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact], corpus: Sequence[Artifact] = ()) -> Outcome:
    """Write the row plan of a tokenized corpus, given by its parts in order, to `work.payload`.

    Args:
        corpus: the corpus, if its rows are ordered by a column.

    Raises:
        SnaketuneError: a sequence longer than a row, and `overflow` is `raise`; a split of which no row can be packed, or
            with too many sequences.
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
            if read["rows"] >= MOST_SEQUENCES:
                raise SnaketuneError(
                    f"{split} has {read['rows']} sequences, and a plan holds fewer than {MOST_SEQUENCES}: divide the corpus"
                )
            keys = _order_keys(spec, split, parts, corpus)
            rows, counts[split], metadata[split] = plan_split(settings, parts, split, read, keys)
            trees = trees or rows.units.has_prefixes
            most = max(read["rows"], rows.units.documents)
            of_rows = None if raw else DocumentWriter(work.state / split, documents, schema, split, parts, most)
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


def _order_keys(spec: PlanSpec, split: str, parts: TokenParts, corpus: Sequence[Artifact]) -> np.ndarray | None:
    """The numbers by which the train sequences are ordered, int or float[n]; None if their order doesn't count."""
    if spec.order == "shuffled" or split != "train":
        return None
    if spec.order == "column":
        return read_table(corpus[0].file(f"{split}-{ORDER_COLUMN}.arrow"))[ORDER_COLUMN].to_numpy()
    lengths = [np.zeros(0, np.int32), *(table["length"].to_numpy() for table in parts.tables(split, ["length"]))]
    keys = np.concatenate(lengths)
    return keys if spec.order == "length" else np.arange(len(keys), dtype=np.int32)


def _write(work: WorkFolder, split: str, rows: SplitPlan, documents: DocumentWriter | None) -> None:
    """Write the rows, segments and pairs of a split, and its documents if there are any, a batch of rows at a time."""
    names = {"rows": ("length", "pieces", "pairs"), "pieces": COLUMNS}
    if rows.units.pairs is not None:
        names["pairs"] = ("sequence", "chosen", "rejected")
    with ExitStack() as stack:
        tables = {}
        for name, columns in names.items():
            schema = pa.schema([(column, pa.int32()) for column in columns])
            file = stack.enter_context(pa.OSFile(str(work.payload / f"{split}-{name}.arrow"), "wb"))
            tables[name] = BatchWriter(stack.enter_context(pa.ipc.new_file(file, schema)), schema, ROWS_PER_BATCH)
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
