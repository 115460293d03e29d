"""Statistics of the packed rows, for the manifest and the report."""

from typing import Any

import numpy as np

from snaketune.packing.best_fit import lower_bound_rows
from snaketune.packing.conversation_overflow import DropCounts
from snaketune.packing.packing_units import PackedUnits
from snaketune.stages.specs import PlanSpec


def packing_metadata(spec: PlanSpec, rows: PackedUnits, drops: DropCounts) -> dict[str, Any]:
    """Return the `packing_metadata` of a split.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` is how many rows
    one conversation or pair per row would take, per packed row; `lower_bound_rows` is the least number of rows of the longest
    length that could hold the tokens, which for rows of one length also counts conversations over half a row.
    """
    if spec.strategy == "none":
        return {"enabled": False, "strategy": spec.strategy}
    tokens = rows.segments.tokens
    total, row_tokens = int(tokens.sum(dtype=np.int64)), int(rows.capacities.sum(dtype=np.int64))
    bound = -(-total // spec.lengths[-1])
    if len(spec.lengths) == 1 and spec.strategy != "wrapped" and rows.completions is None:
        bound = lower_bound_rows(tokens, spec.lengths[-1])
    per_row = round(rows.documents / rows.rows, 3) if rows.rows else None
    supervised = np.add.reduceat(rows.segments.supervised, rows.offsets[:-1]) if rows.rows else np.zeros(1, np.int32)
    metadata = {
        "enabled": True,
        "strategy": spec.strategy,
        "rows": rows.rows,
        "row_tokens": row_tokens,
        "lower_bound_rows": bound,
        "packing_efficiency": round(100 * total / row_tokens, 3) if row_tokens else 100.0,
        "avg_conversations_per_sequence": per_row or 0.0,
        "compression_ratio": per_row or 1.0,
        "supervised_per_row": _spread(supervised),
        "dropped": {"rows": drops.dropped_rows.total(), "tokens": drops.dropped_tokens.total()},
        "truncated": {"rows": drops.truncated_rows, "tokens": drops.truncated_tokens},
        "split": {"rows": drops.split_rows, "pieces": drops.split_pieces},
    }
    if len(spec.lengths) > 1:
        lengths, counts = np.unique(rows.capacities, return_counts=True)
        metadata["rows_by_length"] = {str(length): int(n) for length, n in zip(lengths, counts, strict=True)}
    if rows.pair_offsets is not None:
        metadata["pairs_per_row"] = _spread(np.diff(rows.pair_offsets) if rows.rows else np.zeros(1, np.int32))
    return metadata


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
