"""How well packing went, as manifest and report tell it."""

from typing import Any

import numpy as np

from snaketune.packing.best_fit import lower_bound_rows
from snaketune.packing.conversation_overflow import Losses
from snaketune.packing.packing_units import Placed
from snaketune.stages.specs import PlanSpec


def packing_metadata(spec: PlanSpec, rows: Placed, losses: Losses) -> dict[str, Any]:
    """What is known of a split's rows.

    `packing_efficiency` is the share of the rows' tokens that aren't padding, in percent; `compression_ratio` the rows that
    one conversation or pair each would have taken, per row; `lower_bound_rows` the fewest rows of the longest length that could
    hold the tokens, where rows have one length also counting conversations over half a row.
    """
    if spec.strategy == "none":
        return {"enabled": False, "strategy": spec.strategy}
    tokens = rows.pieces.tokens
    total, room = int(tokens.sum(dtype=np.int64)), int(rows.capacities.sum(dtype=np.int64))
    bound = -(-total // spec.lengths[-1])
    if len(spec.lengths) == 1 and spec.strategy != "wrapped" and rows.completions is None:
        bound = lower_bound_rows(tokens, spec.lengths[-1])
    each = round(rows.documents / rows.rows, 3) if rows.rows else None
    supervised = np.add.reduceat(rows.pieces.supervised, rows.starts[:-1]) if rows.rows else np.zeros(1, np.int32)
    known = {
        "enabled": True,
        "strategy": spec.strategy,
        "rows": rows.rows,
        "row_tokens": room,
        "lower_bound_rows": bound,
        "packing_efficiency": round(100 * total / room, 3) if room else 100.0,
        "avg_conversations_per_sequence": each or 0.0,
        "compression_ratio": each or 1.0,
        "supervised_per_row": _spread(supervised),
        "dropped": {"rows": losses.dropped_rows.total(), "tokens": losses.dropped_tokens.total()},
        "truncated": {"rows": losses.truncated_rows, "tokens": losses.truncated_tokens},
        "split": {"rows": losses.split_rows, "pieces": losses.split_pieces},
    }
    if len(spec.lengths) > 1:
        lengths, counts = np.unique(rows.capacities, return_counts=True)
        known["rows_by_length"] = {str(length): int(n) for length, n in zip(lengths, counts, strict=True)}
    if rows.pair_starts is not None:
        known["pairs_per_row"] = _spread(np.diff(rows.pair_starts) if rows.rows else np.zeros(1, np.int32))
    return known


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}
