"""The planner: which tokens of which sequence go into which row; from lengths, and for prompts with several pairs from ids too.

Memory per sequence: some 120 bytes, 200 if rows are wrapped; per pair 450, 650 if prompts have several pairs.
"""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

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
from snaketune.engine.packing.planned_segments import PlannedSegments, SupervisedRuns
from snaketune.engine.packing.prefix_trees import build_trees
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.tokens import Tokens
from snaketune.engine.packing.truncation import DropCounts, lost_to_length, warning
from snaketune.errors import SnaketuneError

# Prompt tokens and leading tokens of completions that aren't stored again, and tokens stored in addition to the corpus.
SHARED = ("shared_prompt_tokens", "shared_answer_tokens", "mismatched_tokens")


def plan_split(
    settings: PackingSettings, parts: Tokens, split: str, read: dict[str, int], keys: np.ndarray | None = None
) -> tuple[PackedUnits, dict[str, Any], dict[str, Any]]:
    """The rows of a split, its counts and its packing metadata.

    Args:
        read: rows and tokens of the split.
        keys: int or float[n], the numbers by which its sequences are ordered; None if their order doesn't count.
    """
    longest, drops, index = settings.lengths[-1], DropCounts(), parts.index(split)
    shared = dict.fromkeys(SHARED, 0)
    tokens = whole = None
    # A split without rows is planned as conversations, and has no table of pairs.
    if settings.kind != "sft" and len(index):
        tokens = CompletionTokens(parts, split)
        whole = whole_pairs(settings.kind, index, tokens)
    fit_to = partial(fit, settings, index, tokens and tokens.runs, whole)
    fitted = fit_to(longest, drops)
    if read["rows"] and not len(fitted):
        raise SnaketuneError(
            f"no {split} row of {read['rows']} can be packed into {longest} tokens: {dict(drops.dropped_rows)}. If nothing "
            "is supervised, check what the chat template marks; if rows are longer, raise packing.length, or set "
            "packing.overflow to truncate or split"
        )
    loss = lost_to_length(settings, longest, index, drops, read, fit_to)
    unit = {"preference": "pairs", "unpaired": "completions"}.get(settings.kind, "sequences")
    if message := warning(split, unit, longest, settings.overflow, loss, read):
        print(f"warning: {message}", flush=True)
    if keys is not None and settings.strategy != "best-fit-decreasing":
        fitted = fitted.take(np.argsort(keys[fitted.sequence], kind="stable"))
    if settings.strategy == "wrapped":
        rows = wrap(fitted, SupervisedRuns.read(parts, split), longest, drops)
    elif settings.strategy == "none":
        capacities = np.full(len(fitted), longest, np.int32)
        rows = PackedUnits(capacities=capacities, segments=fitted, offsets=np.arange(len(fitted) + 1))
    else:
        if tokens is not None:
            units, shared_tokens = build_trees(fitted, tokens, longest)
            shared = dict(zip(SHARED, shared_tokens, strict=True))
        else:
            units = Units(segments=fitted, offsets=np.append(np.flatnonzero(fitted.prefix == 0), len(fitted)))
        if keys is None or not len(fitted):
            plan = plan_best_fit_decreasing(units.tokens, settings.lengths, units.supervised)
        else:
            # A prompt with several pairs comes where its first pair does.
            unit_keys = keys[units.segments.sequence[units.offsets[:-1]]]
            plan = plan_in_order(units.tokens, longest, units.supervised, unit_keys)
        rows = pack_units(units, plan)
    metadata = _packing_metadata(settings, rows, drops) | {"lost_to_length": loss}
    return rows, _counts(read, rows, drops, shared), metadata


def fit(
    settings: PackingSettings,
    index: pa.Table,
    runs: SupervisedRuns | None,
    whole: PlannedPairs | None,
    row_length: int,
    drops: DropCounts,
) -> PlannedSegments | PlannedPairs:
    """Fit a split's sequences to rows of `row_length` tokens; `runs` and `whole` are of pairs, None for conversations."""
    if whole is not None:
        return fit_pairs(settings, row_length, index, whole, runs, drops)
    return fit_conversations(settings, row_length, index, drops)


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


def _packing_metadata(settings: PackingSettings, rows: PackedUnits, drops: DropCounts) -> dict[str, Any]:
    """The `packing_metadata` of a split.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` is how many rows
    one conversation or pair per row would take, per packed row; `lower_bound_rows` is the least number of rows of the longest
    length that could hold the tokens, which for rows of one length also counts conversations over half a row.
    """
    if settings.strategy == "none":
        return {"enabled": False, "strategy": settings.strategy}
    tokens = rows.segments.tokens
    total, row_tokens = int(tokens.sum(dtype=np.int64)), int(rows.capacities.sum(dtype=np.int64))
    bound = -(-total // settings.lengths[-1])
    if len(settings.lengths) == 1 and settings.strategy != "wrapped" and rows.pairs is None:
        bound = lower_bound_rows(tokens, settings.lengths[-1])
    per_row = round(rows.documents / rows.rows, 3) if rows.rows else None
    metadata = {
        "enabled": True,
        "strategy": settings.strategy,
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
    if len(settings.lengths) > 1:
        lengths, counts = np.unique(rows.capacities, return_counts=True)
        metadata["rows_by_length"] = {str(length): int(n) for length, n in zip(lengths, counts, strict=True)}
    if rows.pair_offsets is not None:
        metadata["pairs_per_row"] = _spread(np.diff(rows.pair_offsets) if rows.rows else np.zeros(1, np.int32))
    return metadata


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
