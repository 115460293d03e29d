"""The row plan of the `plan` stage: which tokens of which sequence go into which row.

The plan is computed from lengths, and for prompts with several pairs also from ids.

Payload, per split: `<split>-rows.arrow` (the length of each row, and its numbers of segments and pairs), `<split>-pieces.arrow`
(the segments, row after row), for preferences `<split>-pairs.arrow` (the sequence of each pair, and the segments of the row
that its completions end with); `documents.arrow`; and `facts.json`, which the manifest of the shards repeats. The payload
depends only on the sequences and their order, not on the parts in which they were tokenized.

Memory per sequence: some 120 bytes, 200 if rows are wrapped; per pair 450, 650 if prompts have several pairs.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.corpus.rows import ORDER_COLUMN
from snaketune.engine.packing.best_fit import (
    PackedUnits,
    Units,
    lower_bound_rows,
    pack_units,
    plan_best_fit_decreasing,
    plan_in_order,
)
from snaketune.engine.packing.conversation_overflow import fit_conversations, wrap
from snaketune.engine.packing.pair_overflow import CompletionTokens, PlannedPairs, fit_pairs, whole_pairs
from snaketune.engine.packing.planned_segments import COLUMNS, PlannedSegments, SupervisedRuns
from snaketune.engine.packing.prefix_trees import build_trees
from snaketune.engine.packing.shards import (
    COPIED,
    FORMAT_VERSIONS,
    RAW_FORMAT_VERSION,
    SPLITS,
    TREE_VERSION,
    WEIGHTED_VERSION,
    documents_schema,
)
from snaketune.engine.packing.truncation import DropCounts, lost_to_length, warning
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PlanSpec
from snaketune.tables import read_table, write_table
from snaketune.tokenization.token_store import TokenParts

ROWS_PER_BATCH = 2**16
FACTS = "facts.json"
# Prompt tokens and leading tokens of completions that aren't stored again, and tokens stored in addition to the corpus.
SHARED = ("shared_prompt_tokens", "shared_answer_tokens", "mismatched_tokens")


def plan_rows(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact], corpus: Artifact | None = None) -> Outcome:
    """Write the row plan of a tokenized corpus, given by its parts in order, to `work.payload`.

    Args:
        corpus: the corpus, if its rows are ordered by a column.

    Raises:
        SnaketuneError: a sequence longer than a row, and `overflow` is `raise`; a split of which no row can be packed.
    """
    parts = TokenParts(tokens)
    raw = spec.strategy == "none"
    counts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    trees = False
    with (
        pa.OSFile(str(work.payload / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, documents_schema(spec.kind)) as documents,
    ):
        for split in SPLITS:
            lengths = parts.index(split, ["length"])["length"]
            read = {"rows": len(lengths), "tokens": pc.sum(lengths).as_py() or 0}
            print(f"planning {split}: {read['rows']} sequences", flush=True)
            rows, counts[split], metadata[split] = _plan_split(spec, parts, split, read, corpus)
            trees = trees or bool(rows.segments.prefix.any())
            _write(work, split, rows)
            if not raw:
                for batch in _documents(spec.kind, split, rows, parts):
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


def _plan_split(
    spec: PlanSpec, parts: TokenParts, split: str, read: dict[str, int], corpus: Artifact | None
) -> tuple[PackedUnits, dict[str, Any], dict[str, Any]]:
    """The rows of a split, its counts and its packing metadata; `read` are the rows and tokens of the split."""
    longest, drops, index = spec.lengths[-1], DropCounts(), parts.index(split)
    shared = dict.fromkeys(SHARED, 0)
    tokens = whole = None
    # A split without rows is planned as conversations, and has no table of pairs.
    if spec.kind != "sft" and len(index):
        tokens = CompletionTokens(parts, split)
        whole = whole_pairs(spec.kind, index, tokens)
    fit_to = partial(fit, spec, index, tokens and tokens.runs, whole)
    fitted = fit_to(longest, drops)
    if read["rows"] and not len(fitted):
        raise SnaketuneError(
            f"no {split} row of {read['rows']} can be packed into {longest} tokens: {dict(drops.dropped_rows)}. If nothing "
            "is supervised, check what the chat template marks; if rows are longer, raise packing.length, or set "
            "packing.overflow to truncate or split"
        )
    loss = lost_to_length(spec, longest, index, drops, read, fit_to)
    unit = {"preference": "pairs", "unpaired": "completions"}.get(spec.kind, "sequences")
    if message := warning(split, unit, longest, spec.overflow, loss, read):
        print(f"warning: {message}", flush=True)
    keys = _order_keys(spec, split, index, corpus)
    if keys is not None and spec.strategy != "best-fit-decreasing":
        fitted = fitted.take(np.argsort(keys[fitted.sequence], kind="stable"))
    if spec.strategy == "wrapped":
        rows = wrap(fitted, SupervisedRuns.read(parts, split), longest, drops)
    elif spec.strategy == "none":
        capacities = np.full(len(fitted), longest, np.int32)
        rows = PackedUnits(capacities=capacities, segments=fitted, offsets=np.arange(len(fitted) + 1))
    else:
        if tokens is not None:
            units, shared_tokens = build_trees(fitted, tokens, longest)
            shared = dict(zip(SHARED, shared_tokens, strict=True))
        else:
            units = Units(segments=fitted, offsets=np.append(np.flatnonzero(fitted.prefix == 0), len(fitted)))
        if keys is None or not len(fitted):
            plan = plan_best_fit_decreasing(units.tokens, spec.lengths, units.supervised)
        else:
            # A prompt with several pairs comes where its first pair does.
            unit_keys = keys[units.segments.sequence[units.offsets[:-1]]]
            plan = plan_in_order(units.tokens, longest, units.supervised, unit_keys)
        rows = pack_units(units, plan)
    metadata = _packing_metadata(spec, rows, drops) | {"lost_to_length": loss}
    return rows, _counts(read, rows, drops, shared), metadata


def _order_keys(spec: PlanSpec, split: str, index: pa.Table, corpus: Artifact | None) -> np.ndarray | None:
    """The numbers by which the train sequences are ordered, int or float[n]; None if their order doesn't count."""
    if spec.order == "shuffled" or split != "train":
        return None
    if spec.order == "length":
        return index["length"].to_numpy()
    if spec.order == "corpus":
        return np.arange(len(index))
    return read_table(corpus.file(f"{split}-{ORDER_COLUMN}.arrow"))[ORDER_COLUMN].to_numpy()


def fit(
    spec: PlanSpec,
    index: pa.Table,
    runs: SupervisedRuns | None,
    whole: PlannedPairs | None,
    row_length: int,
    drops: DropCounts,
) -> PlannedSegments | PlannedPairs:
    """Fit a split's sequences to rows of `row_length` tokens; `runs` and `whole` are of pairs, None for conversations."""
    if whole is not None:
        return fit_pairs(spec, row_length, index, whole, runs, drops)
    return fit_conversations(spec, row_length, index, drops)


def _counts(read: dict[str, int], rows: PackedUnits, drops: DropCounts, shared: dict[str, int]) -> dict[str, Any]:
    """The counts of a split; for tokens, read + mismatched = tokens + dropped + truncated + shared."""
    return {
        "read": read["rows"],
        "read_tokens": read["tokens"],
        "kept": read["rows"] - drops.dropped_rows.total(),
        "pieces": rows.documents,
        "tokens": int(rows.segments.tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(rows.segments.supervised.sum(dtype=np.int64)),
        "dropped": {reason: n for reason, n in sorted(drops.dropped_rows.items()) if n},
        "dropped_tokens": {reason: n for reason, n in sorted(drops.dropped_tokens.items()) if n},
        **drops.cut(),
        **shared,
    }


def _packing_metadata(spec: PlanSpec, rows: PackedUnits, drops: DropCounts) -> dict[str, Any]:
    """The `packing_metadata` of a split.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` is how many rows
    one conversation or pair per row would take, per packed row; `lower_bound_rows` is the least number of rows of the longest
    length that could hold the tokens, which for rows of one length also counts conversations over half a row.
    """
    if spec.strategy == "none":
        return {"enabled": False, "strategy": spec.strategy}
    tokens = rows.segments.tokens
    total, row_tokens = int(tokens.sum(dtype=np.int64)), int(rows.capacities.sum(dtype=np.int64))
    bound = -(-total // spec.lengths[-1])
    if len(spec.lengths) == 1 and spec.strategy != "wrapped" and rows.pairs is None:
        bound = lower_bound_rows(tokens, spec.lengths[-1])
    per_row = round(rows.documents / rows.rows, 3) if rows.rows else None
    metadata = {
        "enabled": True,
        "strategy": spec.strategy,
        "rows": rows.rows,
        "row_tokens": row_tokens,
        "lower_bound_rows": bound,
        "packing_efficiency": round(100 * total / row_tokens, 3) if row_tokens else 100.0,
        "avg_conversations_per_sequence": per_row or 0.0,
        "compression_ratio": per_row or 1.0,
        "supervised_per_row": _spread(rows.supervised if rows.rows else np.zeros(1, np.int32)),
        "dropped": {"rows": drops.dropped_rows.total(), "tokens": drops.dropped_tokens.total()},
        **drops.cut(),
    }
    if len(spec.lengths) > 1:
        lengths, counts = np.unique(rows.capacities, return_counts=True)
        metadata["rows_by_length"] = {str(length): int(n) for length, n in zip(lengths, counts, strict=True)}
    if rows.pair_offsets is not None:
        metadata["pairs_per_row"] = _spread(np.diff(rows.pair_offsets) if rows.rows else np.zeros(1, np.int32))
    return metadata


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


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


def _documents(kind: str, split: str, rows: PackedUnits, parts: TokenParts) -> Iterator[pa.RecordBatch]:
    """Yield record batches of `documents.arrow`, in the order of the rows."""
    schema = documents_schema(kind)
    index = parts.index(split)
    from_index = {name: index[name].combine_chunks() for name in schema.names if name in COPIED}
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
        some = slice(start, start + ROWS_PER_BATCH)
        of = pa.array(sequence[some])
        columns = {
            "split": pa.repeat(split, len(of)),
            "row": row_of[some],
            "tokens": tokens[some],
            "supervised": supervised[some],
            **{name: column.take(of) for name, column in from_index.items()},
        }
        yield pa.record_batch([pa.array(columns[name]) for name in schema.names], schema=schema)
