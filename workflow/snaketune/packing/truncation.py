"""Sequences and tokens that are lost because rows are too short, and the row length that would avoid it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.packing.conversation_overflow import DropCounts
from snaketune.stages.specs import PlanSpec

# Reasons to drop that long enough rows avoid.
TOO_SHORT = ("longer_than_row", "prompt_fills_row", "nothing_supervised_in_a_row", "nothing_supervised_in_a_piece")
WORTH_A_WARNING = 0.02
# The share of the tokens that the advised row length retains.
RETAINED = 0.99
STEP = 64
# Fits all sequences of a split to rows of so many tokens, and updates the counts.
Fit = Callable[[int, DropCounts], object]


@dataclass(frozen=True, kw_only=True)
class LengthLoss:
    """Sequences dropped or cut, and tokens lost, in one split.

    Attributes:
        enough: the shortest row length, in multiples of STEP, that retains RETAINED of the tokens; computed only if the loss is
            worth a warning.
    """

    rows: int
    tokens: int
    enough: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def lost_to_length(
    spec: PlanSpec, row_length: int, index: pa.Table, drops: DropCounts, read: dict[str, int], fit: Fit
) -> LengthLoss:
    """Return what is lost in rows of `row_length` tokens.

    Args:
        index: the split's token index.
        drops: the counts of fitting it to this length.
        read: rows and tokens of the split.
    """
    loss = _loss(drops)
    if not is_worth_a_warning(loss.rows, loss.tokens, read["rows"], read["tokens"]):
        return loss
    return LengthLoss(rows=loss.rows, tokens=loss.tokens, enough=_enough(spec, row_length, index, fit))


def is_worth_a_warning(rows: int, tokens: int, all_rows: int, all_tokens: int) -> bool:
    """Return True if more than WORTH_A_WARNING of the rows or of the tokens are lost."""
    return rows > WORTH_A_WARNING * all_rows or tokens > WORTH_A_WARNING * all_tokens


def warning(split: str, unit: str, row_length: int, overflow: str, lost: dict[str, Any], read: dict[str, int]) -> str:
    """Return the warning about lost tokens, or "" if the loss isn't worth one.

    Args:
        lost: a `LengthLoss` as JSON.
        read: rows and tokens of the split.

    >>> lost = {"rows": 3, "tokens": 900, "enough": 1024}
    >>> warning("train", "pairs", 512, "drop", lost, {"rows": 9, "tokens": 1200}).split("; ")[1]
    'packing.length 1024 would keep 99% of the tokens'
    """
    if not is_worth_a_warning(lost["rows"], lost["tokens"], read["rows"], read["tokens"]):
        return ""
    return (
        f"{split.replace('_', ' ')}: {lost['rows'] / read['rows']:.1%} of the {unit} and {lost['tokens'] / read['tokens']:.1%} "
        f"of the tokens don't fit into rows of {row_length} tokens (overflow: {overflow}); packing.length {lost['enough']} "
        f"would keep {RETAINED:.0%} of the tokens"
    )


def _loss(drops: DropCounts) -> LengthLoss:
    return LengthLoss(
        rows=sum(drops.dropped_rows[reason] for reason in TOO_SHORT) + drops.truncated_rows,
        tokens=sum(drops.dropped_tokens[reason] for reason in TOO_SHORT) + drops.truncated_tokens,
    )


def _enough(spec: PlanSpec, row_length: int, index: pa.Table, fit: Fit) -> int:
    lengths = (index["length"].to_numpy() - index["common"].to_numpy()).astype(np.int64)
    lengths = np.sort(lengths[index["supervised"].to_numpy() > 0])
    total = int(lengths.sum())
    # An upper bound: the row length at which the sequences that fit whole are enough.
    whole = np.searchsorted(np.cumsum(lengths), RETAINED * total)
    high = max(-(-int(lengths[min(whole, len(lengths) - 1)]) // STEP), row_length // STEP + 1)
    low = row_length // STEP + 1

    def is_enough(steps: int) -> bool:
        drops = DropCounts()
        fit(steps * STEP, drops)
        return _loss(drops).tokens <= (1 - RETAINED) * total

    # If long sequences are dropped whole, the upper bound is the answer.
    while low < high and spec.overflow != "drop":
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high * STEP
