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

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.errors import SnaketuneError
from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.completion_tokens import CompletionTokens
from snaketune.packing.conversation_overflow import COLUMNS, DropCounts, PlannedSegments, fit_conversations
from snaketune.packing.packing_metadata import packing_metadata
from snaketune.packing.packing_units import PackedUnits, pack_units, single_segment_units
from snaketune.packing.pair_overflow import PlannedPairs, fit_pairs, whole_pairs
from snaketune.packing.prefix_trees import SharedTokens, build_trees
from snaketune.packing.shards import FORMAT_VERSIONS, PAIR_COLUMNS, RAW_FORMAT_VERSION, SPLITS, documents_schema
from snaketune.packing.supervised_runs import SupervisedRuns
from snaketune.packing.truncation import lost_to_length, warning
from snaketune.packing.wrap import wrap
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PlanSpec
from snaketune.tables import write_table
from snaketune.tokenization.token_store import TokenParts

ROWS_PER_BATCH = 2**16
FACTS = "facts.json"
ROWS = pa.schema([("length", pa.int32()), ("pieces", pa.int32()), ("pairs", pa.int32())])
SEGMENTS = pa.schema([(name, pa.int32()) for name in COLUMNS])
PAIRS = pa.schema([(name, pa.int32()) for name in ("sequence", "chosen", "rejected")])


def plan_rows(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact]) -> Outcome:
    """Write the row plan to `work.payload`.

    Args:
        tokens: the parts of a tokenized corpus, in order.
    Raises:
        SnaketuneError: a sequence longer than a row, and `overflow` is `raise`; a split of which no row can be packed.
    """
    parts = TokenParts(tokens)
    counts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    with (
        pa.OSFile(str(work.payload / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, documents_schema(spec.kind)) as documents,
    ):
        for split in SPLITS:
            read = {name: sum(part.manifest["counts"][split][name] for part in tokens) for name in ("rows", "tokens")}
            print(f"planning {split}: {read['rows']} sequences", flush=True)
            rows, counts[split], metadata[split] = _plan_split(spec, parts, split, read)
            _write(work, split, rows)
            if spec.strategy != "none":
                for batch in _documents(spec.kind, split, rows, parts):
                    documents.write_batch(batch)
    raw = spec.strategy == "none"
    facts = {
        "format_version": RAW_FORMAT_VERSION if raw else FORMAT_VERSIONS[spec.kind],
        "kind": spec.kind,
        "row_length": spec.lengths[-1],
        "packing_metadata": metadata["train"],
        "packing_metadata_held_out": metadata["held_out"],
        "padding_id": tokens[0].manifest["pad_id"],
    }
    # `pack` repeats the counts in its manifest, so they have to be part of the content of the plan.
    write_json(work.payload / FACTS, {"about": facts, "counts": counts})
    return Outcome(counts=counts, about=facts)


def _plan_split(
    spec: PlanSpec, parts: TokenParts, split: str, read: dict[str, int]
) -> tuple[PackedUnits, dict[str, Any], dict[str, Any]]:
    """Return the rows of a split, its counts and its packing metadata.

    Args:
        read: rows and tokens of the split.
    """
    longest, drops, shared, index = spec.lengths[-1], DropCounts(), SharedTokens(), parts.index(split)
    tokens = whole = None
    if spec.kind != "sft":
        tokens = CompletionTokens(parts, split, SupervisedRuns.read(parts, split))
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
    if message := warning(split, unit, longest, spec.overflow, loss.as_json(), read):
        print(f"warning: {message}", flush=True)
    if isinstance(fitted, PlannedPairs) and tokens:
        units, shared = build_trees(fitted, tokens, longest)
        rows = pack_units(units, plan_best_fit_decreasing(units.tokens, spec.lengths, units.supervised))
    else:
        rows = _pack_conversations(spec, fitted, index, drops)
    metadata = packing_metadata(spec, rows, drops) | {"lost_to_length": loss.as_json()}
    return rows, _counts(read, rows, drops, shared), metadata


def fit(
    spec: PlanSpec,
    index: pa.Table,
    runs: SupervisedRuns | None,
    whole: PlannedPairs | None,
    row_length: int,
    drops: DropCounts,
) -> PlannedSegments | PlannedPairs:
    """Fit a split's sequences to rows of `row_length` tokens.

    Args:
        runs, whole: of pairs; None for conversations.
    """
    if runs and whole:
        return fit_pairs(spec, row_length, index, whole, runs, drops)
    return fit_conversations(spec, row_length, index.to_batches(), drops)


def _pack_conversations(spec: PlanSpec, segments: PlannedSegments, index: pa.Table, drops: DropCounts) -> PackedUnits:
    if spec.strategy == "wrapped":
        segments, plan = wrap(segments, index.to_batches(), spec.lengths[-1], drops)
        return PackedUnits(capacities=plan.capacities, segments=segments, offsets=plan.offsets)
    if spec.strategy == "none":
        capacities = np.full(len(segments), spec.lengths[-1], np.int32)
        return PackedUnits(capacities=capacities, segments=segments, offsets=np.arange(len(segments) + 1))
    plan = plan_best_fit_decreasing(segments.tokens, spec.lengths, segments.supervised)
    return pack_units(single_segment_units(segments), plan)


def _counts(read: dict[str, int], rows: PackedUnits, drops: DropCounts, shared: SharedTokens) -> dict[str, Any]:
    """Return the counts of a split; for tokens, read + mismatched = tokens + dropped + truncated + shared."""
    return {
        "read": read["rows"],
        "read_tokens": read["tokens"],
        "kept": read["rows"] - drops.dropped_rows.total(),
        "pieces": rows.documents,
        "tokens": int(rows.segments.tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(rows.segments.supervised.sum(dtype=np.int64)),
        "dropped": {reason: n for reason, n in sorted(drops.dropped_rows.items()) if n},
        "dropped_tokens": {reason: n for reason, n in sorted(drops.dropped_tokens.items()) if n},
        "truncated": {"rows": drops.truncated_rows, "tokens": drops.truncated_tokens},
        "split": {"rows": drops.split_rows, "pieces": drops.split_pieces},
        "shared_prompt_tokens": shared.prompts,
        "shared_answer_tokens": shared.answers,
        "mismatched_tokens": shared.mismatched,
    }


def _write(work: WorkFolder, split: str, rows: PackedUnits) -> None:
    pairs = np.zeros(rows.rows, np.int32) if rows.pair_offsets is None else np.diff(rows.pair_offsets)
    columns = {
        "rows": (ROWS, [rows.capacities, np.diff(rows.offsets), pairs]),
        "pieces": (SEGMENTS, [getattr(rows.segments, name) for name in COLUMNS]),
    }
    if rows.completions is not None:
        columns["pairs"] = (PAIRS, [rows.completions.sequence, *rows.completions.ends.T])
    for name, (schema, arrays) in columns.items():
        table = pa.table([pa.array(array, pa.int32()) for array in arrays], schema=schema)
        write_table(work.payload / f"{split}-{name}.arrow", table, ROWS_PER_BATCH)


def _documents(kind: str, split: str, rows: PackedUnits, parts: TokenParts) -> Iterator[pa.RecordBatch]:
    """Yield record batches of `documents.arrow`, in the order of the rows."""
    schema = documents_schema(kind)
    index = parts.index(split)
    from_index = {name: index[name].combine_chunks() for name in schema.names if name in ("id", *PAIR_COLUMNS)}
    sequence, offsets = rows.segments.sequence, rows.offsets
    tokens, supervised = rows.segments.tokens, rows.segments.supervised
    if rows.completions is not None:
        sequence, offsets = rows.completions.sequence, rows.pair_offsets
        tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
    row_of = np.repeat(np.arange(rows.rows, dtype=np.int32), np.diff(offsets))
    for start in range(0, len(sequence), ROWS_PER_BATCH):
        some = slice(start, start + ROWS_PER_BATCH)
        of = pa.array(sequence[some])
        columns = {
            "split": pa.repeat(split, len(of)),
            "row": row_of[some],
            "tokens": tokens[some],
            "supervised": supervised[some],
        }
        columns |= {name: column.take(of) for name, column in from_index.items()}
        yield pa.record_batch([pa.array(columns[name]) for name in schema.names], schema=schema)
