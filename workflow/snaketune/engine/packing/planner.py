"""The planner: which tokens of which sequence go into which row; from lengths, and for prompts with several pairs from ids too.

Memory: 12 bytes per conversation and some 20 per row, 16 per conversation in all where rows hold five or more, and some 200 MB;
20 and 30 for rows of 2**16 tokens or more. Conversations that are cut, or are trees, take 40 bytes per segment on top.

These hold for best-fit-decreasing and shuffled rows of conversations. Rows in another order take 60 bytes per conversation,
wrapped rows 310, raw ones 50; pairs 450 each, 650 if prompts have several.
"""

from collections import deque
from functools import partial
from typing import Any

import numpy as np

from snaketune.engine.packing.best_fit import PackingPlan, lower_bound_rows, plan_best_fit_decreasing, plan_in_order
from snaketune.engine.packing.conversation_overflow import columns_of, fit_conversations, fit_tables, wrap
from snaketune.engine.packing.packed_units import ConversationUnits, SplitPlan, Units
from snaketune.engine.packing.pair_overflow import CompletionTokens, PlannedPairs, fit_pairs, whole_pairs
from snaketune.engine.packing.planned_segments import SupervisedRuns
from snaketune.engine.packing.prefix_trees import build_trees
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.tokens import Tokens
from snaketune.engine.packing.truncation import LENGTHS, DropCounts, lost_to_length, warning
from snaketune.errors import SnaketuneError

# Prompt tokens and leading tokens of completions that aren't stored again, and tokens stored in addition to the corpus.
SHARED = ("shared_prompt_tokens", "shared_answer_tokens", "mismatched_tokens")


def plan_split(
    settings: PackingSettings, parts: Tokens, split: str, read: dict[str, int], keys: np.ndarray | None = None
) -> tuple[SplitPlan, dict[str, Any], dict[str, Any]]:
    """The rows of a split, its counts and its packing metadata.

    Args:
        read: rows and tokens of the split.
        keys: int or float[n], the numbers by which its sequences are ordered; None if their order doesn't count.
    """
    longest, drops, shared = settings.lengths[-1], DropCounts(), dict.fromkeys(SHARED, 0)
    tokens = None
    # A split without rows is planned as conversations, and has no table of pairs.
    if settings.kind != "sft" and read["rows"]:
        index, tokens = parts.index(split), CompletionTokens(parts, split)
        whole = whole_pairs(settings.kind, index, tokens)

        def fit_to(row_length: int, drops: DropCounts) -> PlannedPairs:
            return fit_pairs(settings, row_length, index, whole, tokens.runs, drops)

        fitted = fit_to(longest, drops)
    else:
        tables = partial(parts.tables, split, columns_of(settings))
        fitted = fit_conversations(settings, longest, tables(), drops)

        def fit_to(row_length: int, drops: DropCounts) -> None:
            # Only the counts are needed.
            deque(fit_tables(settings, row_length, tables(), drops), maxlen=0)

    if read["rows"] and not len(fitted):
        raise SnaketuneError(
            f"no {split} row of {read['rows']} can be packed into {longest} tokens: {dict(drops.dropped_rows)}. If nothing "
            "is supervised, check what the chat template marks; if rows are longer, raise packing.length, or set "
            "packing.overflow to truncate or split"
        )
    loss = lost_to_length(settings, longest, parts.tables(split, LENGTHS), drops, read, fit_to)
    unit = {"preference": "pairs", "unpaired": "completions"}.get(settings.kind, "sequences")
    if message := warning(split, unit, longest, settings.overflow, loss, read):
        print(f"warning: {message}", flush=True)
    units: Units | ConversationUnits = fitted
    if tokens is not None:
        units, shared_tokens = build_trees(fitted, tokens, longest)
        shared = dict(zip(SHARED, shared_tokens, strict=True))
    elif settings.strategy != "best-fit-decreasing":
        runs = SupervisedRuns.read(parts, split) if settings.strategy == "wrapped" else None
        units = _rows_in_order(fitted, keys, runs, longest, drops)
    del fitted
    if settings.strategy != "best-fit-decreasing":
        every = np.arange(len(units.offsets))
        plan = PackingPlan(order=every[:-1], offsets=every, capacities=np.full(len(every) - 1, longest, np.int32))
    elif keys is None or not len(units):
        plan = plan_best_fit_decreasing(units.tokens, settings.lengths, units.supervised)
    else:
        # A prompt with several pairs comes where its first pair does.
        plan = plan_in_order(units.tokens, longest, units.supervised, keys[units.sequence])
    rows = SplitPlan(units=units, plan=plan)
    metadata = _packing_metadata(settings, rows, drops) | {"lost_to_length": loss}
    return rows, _counts(read, rows, drops, shared), metadata


def _rows_in_order(
    fitted: ConversationUnits, keys: np.ndarray | None, runs: SupervisedRuns | None, longest: int, drops: DropCounts
) -> Units:
    """Rows of one unit: each of a segment, or, with the supervised runs of all conversations, wrapped."""
    order = np.flatnonzero(fitted.tokens)
    if keys is not None:
        order = order[np.argsort(keys[fitted.sequence_of(order)], kind="stable")]
    segments = fitted.take(order).segments
    del order
    if runs is None:
        return Units(segments=segments, offsets=np.arange(len(segments) + 1))
    segments, offsets = wrap(segments, runs, longest, drops)
    return Units(segments=segments, offsets=offsets)


def _counts(read: dict[str, int], rows: SplitPlan, drops: DropCounts, shared: dict[str, int]) -> dict[str, Any]:
    """The counts of a split; for tokens, read + mismatched = tokens + dropped + truncated + shared."""
    return {
        "read": read["rows"],
        "read_tokens": read["tokens"],
        "kept": read["rows"] - drops.dropped_rows.total(),
        "pieces": rows.units.documents,
        "tokens": int(rows.units.tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(rows.units.supervised.sum(dtype=np.int64)),
        "dropped": {reason: n for reason, n in sorted(drops.dropped_rows.items()) if n},
        "dropped_tokens": {reason: n for reason, n in sorted(drops.dropped_tokens.items()) if n},
        **drops.cut(),
        **shared,
    }


def _packing_metadata(settings: PackingSettings, rows: SplitPlan, drops: DropCounts) -> dict[str, Any]:
    """The `packing_metadata` of a split.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` is how many rows
    one conversation or pair per row would take, per packed row; `lower_bound_rows` is the least number of rows of the longest
    length that could hold the tokens, which for rows of one length also counts conversations over half a row.
    """
    if settings.strategy == "none":
        return {"enabled": False, "strategy": settings.strategy}
    units, capacities = rows.units, rows.plan.capacities
    total, row_tokens = int(units.tokens.sum(dtype=np.int64)), int(capacities.sum(dtype=np.int64))
    bound = -(-total // settings.lengths[-1])
    if len(settings.lengths) == 1 and settings.strategy != "wrapped" and units.pairs is None:
        bound = lower_bound_rows(units.segment_tokens, settings.lengths[-1])
    per_row = round(units.documents / rows.rows, 3) if rows.rows else None
    metadata = {
        "enabled": True,
        "strategy": settings.strategy,
        "rows": rows.rows,
        "row_tokens": row_tokens,
        "lower_bound_rows": bound,
        "packing_efficiency": round(100 * total / row_tokens, 3) if row_tokens else 100.0,
        "avg_conversations_per_sequence": per_row or 0.0,
        "compression_ratio": per_row or 1.0,
        "supervised_per_row": _spread(rows.sums(units.supervised)),
        "dropped": {"rows": drops.dropped_rows.total(), "tokens": drops.dropped_tokens.total()},
        **drops.cut(),
    }
    if len(settings.lengths) > 1:
        lengths, counts = np.unique(capacities, return_counts=True)
        metadata["rows_by_length"] = {str(length): int(n) for length, n in zip(lengths, counts, strict=True)}
    if units.pairs is not None:
        metadata["pairs_per_row"] = _spread(rows.sums(np.diff(units.pair_offsets)))
    return metadata


def _spread(values: np.ndarray) -> dict[str, int]:
    values = values if len(values) else np.zeros(1, np.int32)
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
