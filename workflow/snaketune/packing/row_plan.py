"""What the `plan` stage computes: which piece of which sequence goes into which row, from lengths, and from ids where prompts
come again.

Payload, per split: `<split>-rows.arrow` (of each row its length, pieces and pairs), `<split>-pieces.arrow` (the pieces, row
after row: each becomes a segment), for preferences `<split>-pairs.arrow` (of each pair its sequence, and the segments of the
row with which its completions end); `documents.arrow`; and `facts.json`, which the shards' manifest repeats. It depends on the
sequences and their order only, not on the parts that they were tokenized in. Some 120 bytes of memory per sequence, 200 where
rows are wrapped; 450 per pair, 650 where prompts come again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.errors import SnaketuneError
from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.completion_tokens import Spelling
from snaketune.packing.conversation_overflow import COLUMNS, Losses, Pieces, pieces_of
from snaketune.packing.packing_metadata import packing_metadata
from snaketune.packing.packing_units import Placed, placed, singles
from snaketune.packing.pair_overflow import Pairs, pairs_of, whole_pairs
from snaketune.packing.prefix_trees import Shared, trees_of
from snaketune.packing.shards import FORMAT_VERSIONS, RAW_FORMAT_VERSION, SPLITS, TOLD, documents_schema
from snaketune.packing.supervised_runs import Runs
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
PIECES = pa.schema([(name, pa.int32()) for name in COLUMNS])
PAIRS = pa.schema([(name, pa.int32()) for name in ("sequence", "chosen", "rejected")])


def plan_rows(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact]) -> Outcome:
    """Fill `work.payload`.

    Args:
        tokens: the parts of a tokenized corpus, in order.
    Raises:
        SnaketuneError: a sequence longer than a row where `overflow` is `raise`; nothing left of a split that has rows.
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
            rows, counts[split], metadata[split] = _of_split(spec, parts, split, read)
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
    # The counts are told of the shards as well, so that they are part of what can be read from a plan.
    write_json(work.payload / FACTS, {"about": facts, "counts": counts})
    return Outcome(counts=counts, about=facts)


def _of_split(
    spec: PlanSpec, parts: TokenParts, split: str, read: dict[str, int]
) -> tuple[Placed, dict[str, Any], dict[str, Any]]:
    """The rows of a split, what went where, and how well.

    Args:
        read: rows and tokens of the split.
    """
    longest, losses, shared, index = spec.lengths[-1], Losses(), Shared(), parts.index(split)
    spelling = whole = None
    if spec.kind != "sft":
        spelling = Spelling(parts, split, Runs.of(parts, split))
        whole = whole_pairs(spec.kind, index, spelling)
    cut_to = partial(cut, spec, index, spelling and spelling.runs, whole)
    kept = cut_to(longest, losses)
    if read["rows"] and not len(kept):
        raise SnaketuneError(
            f"no {split} row of {read['rows']} can be packed into {longest} tokens: {dict(losses.dropped_rows)}. Where nothing "
            "is supervised, check what the chat template marks; where rows are longer, raise packing.length, or set "
            "packing.overflow to truncate or split"
        )
    lost = lost_to_length(spec, longest, index, losses, read, cut_to)
    unit = {"preference": "pairs", "unpaired": "completions"}.get(spec.kind, "sequences")
    if said := warning(split, unit, longest, spec.overflow, lost.as_json(), read):
        print(f"warning: {said}", flush=True)
    if isinstance(kept, Pairs) and spelling:
        units, shared = trees_of(kept, spelling, longest)
        rows = placed(units, plan_best_fit_decreasing(units.tokens, spec.lengths, units.supervised))
    else:
        rows = _conversations(spec, kept, index, losses)
    metadata = packing_metadata(spec, rows, losses) | {"lost_to_length": lost.as_json()}
    return rows, _counts(read, rows, losses, shared), metadata


def cut(
    spec: PlanSpec, index: pa.Table, runs: Runs | None, whole: Pairs | None, row_length: int, losses: Losses
) -> Pieces | Pairs:
    """What of a split's sequences goes into rows of so many tokens.

    Args:
        runs, whole: where they are pairs.
    """
    if runs and whole:
        return pairs_of(spec, row_length, index, whole, runs, losses)
    return pieces_of(spec, row_length, index.to_batches(), losses)


def _conversations(spec: PlanSpec, pieces: Pieces, index: pa.Table, losses: Losses) -> Placed:
    if spec.strategy == "wrapped":
        pieces, plan = wrap(pieces, index.to_batches(), spec.lengths[-1], losses)
        return Placed(capacities=plan.capacities, pieces=pieces, starts=plan.starts)
    if spec.strategy == "none":
        capacities = np.full(len(pieces), spec.lengths[-1], np.int32)
        return Placed(capacities=capacities, pieces=pieces, starts=np.arange(len(pieces) + 1))
    return placed(singles(pieces), plan_best_fit_decreasing(pieces.tokens, spec.lengths, pieces.supervised))


def _counts(read: dict[str, int], rows: Placed, losses: Losses, shared: Shared) -> dict[str, Any]:
    """Where every sequence and token went: read + mismatched = tokens + dropped + truncated + shared."""
    return {
        "read": read["rows"],
        "read_tokens": read["tokens"],
        "kept": read["rows"] - losses.dropped_rows.total(),
        "pieces": rows.documents,
        "tokens": int(rows.pieces.tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(rows.pieces.supervised.sum(dtype=np.int64)),
        "dropped": {reason: n for reason, n in sorted(losses.dropped_rows.items()) if n},
        "dropped_tokens": {reason: n for reason, n in sorted(losses.dropped_tokens.items()) if n},
        "truncated": {"rows": losses.truncated_rows, "tokens": losses.truncated_tokens},
        "split": {"rows": losses.split_rows, "pieces": losses.split_pieces},
        "shared_prompt_tokens": shared.prompts,
        "shared_answer_tokens": shared.answers,
        "mismatched_tokens": shared.mismatched,
    }


def _write(work: WorkFolder, split: str, rows: Placed) -> None:
    pairs = np.zeros(rows.rows, np.int32) if rows.pair_starts is None else np.diff(rows.pair_starts)
    columns = {
        "rows": (ROWS, [rows.capacities, np.diff(rows.starts), pairs]),
        "pieces": (PIECES, [getattr(rows.pieces, name) for name in COLUMNS]),
    }
    if rows.completions is not None:
        columns["pairs"] = (PAIRS, [rows.completions.sequence, *rows.completions.ends.T])
    for name, (schema, arrays) in columns.items():
        table = pa.table([pa.array(array, pa.int32()) for array in arrays], schema=schema)
        write_table(work.payload / f"{split}-{name}.arrow", table, ROWS_PER_BATCH)


def _documents(kind: str, split: str, rows: Placed, parts: TokenParts) -> Iterator[pa.RecordBatch]:
    """What is in which row, in the order of the rows."""
    schema = documents_schema(kind)
    index = parts.index(split)
    told = {name: index[name].combine_chunks() for name in schema.names if name in ("id", *TOLD)}
    sequence, starts = rows.pieces.sequence, rows.starts
    tokens, supervised = rows.pieces.tokens, rows.pieces.supervised
    if rows.completions is not None:
        sequence, starts = rows.completions.sequence, rows.pair_starts
        tokens, supervised = rows.by_pair(tokens), rows.by_pair(supervised)
    row_of = np.repeat(np.arange(rows.rows, dtype=np.int32), np.diff(starts))
    for start in range(0, len(sequence), ROWS_PER_BATCH):
        some = slice(start, start + ROWS_PER_BATCH)
        of = pa.array(sequence[some])
        columns = {
            "split": pa.repeat(split, len(of)),
            "row": row_of[some],
            "tokens": tokens[some],
            "supervised": supervised[some],
        }
        columns |= {name: column.take(of) for name, column in told.items()}
        yield pa.record_batch([pa.array(columns[name]) for name in schema.names], schema=schema)
