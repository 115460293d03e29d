"""The `plan` stage: which piece of which sequence goes into which row, from lengths alone.

Payload, per split: `<split>-rows.arrow` (tokens and pieces of each row), `<split>-pieces.arrow` (the pieces, row after row);
`documents.arrow`; and `facts.json`, which the shards' manifest repeats. It depends on the sequences and their order only, not
on the parts that they were tokenized in. Some 120 bytes of memory per sequence, 200 where rows are wrapped.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.errors import SnaketuneError
from snaketune.packing.best_fit import PackingPlan, lower_bound_rows, plan_best_fit_decreasing
from snaketune.packing.lost import lost_to_length, warning
from snaketune.packing.pieces import COLUMNS, Losses, Pieces, pieces_of
from snaketune.packing.shards import DOCUMENTS, FORMAT_VERSIONS, RAW_FORMAT_VERSION, SPLITS
from snaketune.packing.units import shared_prompts, singles
from snaketune.packing.wrapped import wrap
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PlanSpec
from snaketune.stages.work import WorkFolder
from snaketune.tables import write_table
from snaketune.tokenization.tokens import TokenParts

ROWS_PER_BATCH = 2**16
FACTS = "facts.json"
ROWS = pa.schema([("length", pa.int32()), ("pieces", pa.int32())])
PIECES = pa.schema([(name, pa.int32()) for name in COLUMNS])


def build(spec: PlanSpec, work: WorkFolder, *, tokens: list[Artifact]) -> Outcome:
    """Fill `work.payload`.

    Args:
        tokens: the parts of a tokenized corpus, in order.
    Raises:
        SnaketuneError: a sequence longer than a row where `overflow` is `raise`; nothing left of a split that has rows.
    """
    parts = TokenParts(tokens)
    lengths = spec.lengths
    counts: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    with (
        pa.OSFile(str(work.payload / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, DOCUMENTS) as documents,
    ):
        for split in SPLITS:
            losses = Losses()
            print(
                f"planning {split}: {sum(part.manifest['counts'][split]['rows'] for part in tokens)} sequences",
                flush=True,
            )
            read = {name: sum(part.manifest["counts"][split][name] for part in tokens) for name in ("rows", "tokens")}
            pieces = pieces_of(spec, lengths[-1], parts.index(split).to_batches(), losses)
            if read["rows"] and not len(pieces):
                raise SnaketuneError(
                    f"no {split} row of {read['rows']} can be packed into {lengths[-1]} tokens: "
                    f"{dict(losses.dropped_rows)}. Where nothing is supervised, check what the chat template marks; where "
                    "rows are longer, raise packing.length, or set packing.overflow to truncate or split"
                )
            lost = lost_to_length(spec, lengths[-1], parts.index(split).to_batches(), losses, read)
            unit = "pairs" if spec.kind == "preference" else "sequences"
            if said := warning(split, unit, lengths[-1], spec.overflow, lost.as_json(), read):
                print(f"warning: {said}", flush=True)
            pieces, plan, saved = _planned(spec, lengths, pieces, parts.index(split).to_batches(), losses)
            counts[split] = _counts(read, pieces, losses, saved)
            metadata[split] = _packing_metadata(spec, lengths, pieces, plan, losses) | {
                "lost_to_length": lost.as_json()
            }
            _write(work, split, pieces, plan)
            if spec.strategy != "none":
                for batch in _documents(split, pieces, plan, parts):
                    documents.write_batch(batch)
    raw = spec.strategy == "none"
    facts = {
        "format_version": RAW_FORMAT_VERSION if raw else FORMAT_VERSIONS[spec.kind],
        "kind": spec.kind,
        "row_length": lengths[-1],
        "packing_metadata": metadata["train"],
        "packing_metadata_held_out": metadata["held_out"],
        "padding_id": tokens[0].manifest["pad_id"],
    }
    # The counts are told of the shards as well, so that they are part of what can be read from a plan.
    write_json(work.payload / FACTS, {"about": facts, "counts": counts})
    return Outcome(counts=counts, about=facts)


def _planned(
    spec: PlanSpec,
    lengths: tuple[int, ...],
    pieces: Pieces,
    index: list[pa.RecordBatch],
    losses: Losses,
) -> tuple[Pieces, PackingPlan, int]:
    """The pieces row after row, the rows with starts counted in pieces, and the prompt tokens saved by sharing."""
    if spec.strategy == "wrapped":
        return *wrap(pieces, index, lengths[-1], losses), 0
    if spec.strategy == "none":
        starts = np.arange(len(pieces) + 1)
        capacities = np.full(len(pieces), lengths[-1], np.int32)
        return pieces, PackingPlan(order=starts[:-1], starts=starts, capacities=capacities), 0
    units = shared_prompts(pieces, index, lengths[-1]) if spec.kind == "preference" else singles(pieces)
    plan = units.expanded(plan_best_fit_decreasing(units.tokens, lengths, units.supervised))
    return units.pieces.take(plan.order), plan, units.saved


def _counts(read: dict[str, int], pieces: Pieces, losses: Losses, saved: int) -> dict[str, Any]:
    """Where every sequence and token went: read = tokens + dropped + truncated + shared."""
    return {
        "read": read["rows"],
        "read_tokens": read["tokens"],
        "kept": read["rows"] - losses.dropped_rows.total(),
        "pieces": len(pieces),
        "tokens": int(pieces.tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(pieces.supervised.sum(dtype=np.int64)),
        "dropped": {reason: n for reason, n in sorted(losses.dropped_rows.items()) if n},
        "dropped_tokens": {reason: n for reason, n in sorted(losses.dropped_tokens.items()) if n},
        "truncated": {"rows": losses.truncated_rows, "tokens": losses.truncated_tokens},
        "split": {"rows": losses.split_rows, "pieces": losses.split_pieces},
        "shared_prompt_tokens": saved,
    }


def _packing_metadata(
    spec: PlanSpec, lengths: tuple[int, ...], pieces: Pieces, plan: PackingPlan, losses: Losses
) -> dict[str, Any]:
    """How well it went.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` the rows that
    one conversation each would have taken, per row; `lower_bound_rows` the fewest rows of the longest length that could hold
    the tokens, where rows have one length also counting pieces over half a row.
    """
    if spec.strategy == "none":
        return {"enabled": False, "strategy": spec.strategy}
    tokens = pieces.tokens
    room = int(plan.capacities.sum(dtype=np.int64))
    per_row = np.add.reduceat(pieces.supervised, plan.starts[:-1]) if plan.rows else np.zeros(1, np.int32)
    several = {
        "rows_by_length": {
            str(length): int(n) for length, n in zip(*np.unique(plan.capacities, return_counts=True), strict=True)
        }
    }
    if len(lengths) > 1 or spec.strategy == "wrapped":
        bound = -(-int(tokens.sum(dtype=np.int64)) // lengths[-1])
    else:
        bound = lower_bound_rows(tokens, lengths[-1])
    return {
        "enabled": True,
        "strategy": spec.strategy,
        "rows": plan.rows,
        "row_tokens": room,
        "lower_bound_rows": bound,
        "packing_efficiency": round(100 * int(tokens.sum(dtype=np.int64)) / room, 3) if room else 100.0,
        "avg_conversations_per_sequence": round(len(pieces) / plan.rows, 3) if plan.rows else 0.0,
        "compression_ratio": round(len(pieces) / plan.rows, 3) if plan.rows else 1.0,
        "supervised_per_row": {
            "min": int(per_row.min()),
            "median": int(np.median(per_row)),
            "max": int(per_row.max()),
        },
        "dropped": {"rows": losses.dropped_rows.total(), "tokens": losses.dropped_tokens.total()},
        "truncated": {"rows": losses.truncated_rows, "tokens": losses.truncated_tokens},
        "split": {"rows": losses.split_rows, "pieces": losses.split_pieces},
    } | (several if len(lengths) > 1 else {})


def _write(work: WorkFolder, split: str, pieces: Pieces, plan: PackingPlan) -> None:
    columns = {
        "rows": (ROWS, [plan.capacities, np.diff(plan.starts)]),
        "pieces": (PIECES, [getattr(pieces, name) for name in COLUMNS]),
    }
    for name, (schema, arrays) in columns.items():
        table = pa.table([pa.array(array, pa.int32()) for array in arrays], schema=schema)
        write_table(work.payload / f"{split}-{name}.arrow", table, ROWS_PER_BATCH)


def _documents(split: str, pieces: Pieces, plan: PackingPlan, parts: TokenParts) -> Iterator[pa.RecordBatch]:
    """Which piece is in which row, in the order of the rows."""
    ids = parts.index(split, ["id"]).column(0).combine_chunks()
    row_of = np.repeat(np.arange(plan.rows, dtype=np.int32), np.diff(plan.starts))
    for start in range(0, len(pieces), ROWS_PER_BATCH):
        some = slice(start, start + ROWS_PER_BATCH)
        own = pieces.take(np.arange(*some.indices(len(pieces))))
        yield pa.record_batch(
            [
                pa.array([split] * len(own), pa.string()),
                pa.array(row_of[some]),
                ids.take(pa.array(own.sequence)),
                pa.array(own.tokens),
                pa.array(own.supervised),
            ],
            schema=DOCUMENTS,
        )
