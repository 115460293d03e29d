"""What is lost because rows are short, and how long they would have to be."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.packing.conversation_overflow import Losses
from snaketune.stages.specs import PlanSpec

# Reasons to drop that longer rows would take away.
TOO_SHORT = ("longer_than_row", "prompt_fills_row", "nothing_supervised_in_a_row", "nothing_supervised_in_a_piece")
WORTH_A_WARNING = 0.02
KEPT = 0.99
STEP = 64
# Cuts all sequences of a split to rows of so many tokens, and counts what is lost.
Cut = Callable[[int, Losses], object]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Sequences that were dropped or cut, and tokens that are gone, in one split.

    Attributes:
        enough: the shortest row, in multiples of STEP, that would keep KEPT of the tokens; looked for only where what is lost
            is worth a warning.
    """

    rows: int
    tokens: int
    enough: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def lost_to_length(
    spec: PlanSpec, row_length: int, index: pa.Table, losses: Losses, read: dict[str, int], cut: Cut
) -> Lost:
    """What rows of `row_length` tokens lose.

    Args:
        index: of the split.
        losses: what was counted when it was cut.
        read: rows and tokens of the split.
    """
    lost = _lost(losses)
    if not is_worth_a_warning(lost.rows, lost.tokens, read["rows"], read["tokens"]):
        return lost
    return Lost(rows=lost.rows, tokens=lost.tokens, enough=_enough(spec, row_length, index, cut))


def is_worth_a_warning(rows: int, tokens: int, all_rows: int, all_tokens: int) -> bool:
    """Whether more than WORTH_A_WARNING of the rows, or of the tokens, are lost."""
    return rows > WORTH_A_WARNING * all_rows or tokens > WORTH_A_WARNING * all_tokens


def warning(split: str, unit: str, row_length: int, overflow: str, lost: dict[str, Any], read: dict[str, int]) -> str:
    """What to say of it; nothing where that isn't worth a warning.

    Args:
        lost: a `Lost` as JSON.
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
        f"would keep {KEPT:.0%} of the tokens"
    )


def _lost(losses: Losses) -> Lost:
    return Lost(
        rows=sum(losses.dropped_rows[reason] for reason in TOO_SHORT) + losses.truncated_rows,
        tokens=sum(losses.dropped_tokens[reason] for reason in TOO_SHORT) + losses.truncated_tokens,
    )


def _enough(spec: PlanSpec, row_length: int, index: pa.Table, cut: Cut) -> int:
    lengths = (index["length"].to_numpy() - index["common"].to_numpy()).astype(np.int64)
    lengths = np.sort(lengths[index["supervised"].to_numpy() > 0])
    total = int(lengths.sum())
    # Rows in which what fits whole is enough.
    whole = np.searchsorted(np.cumsum(lengths), KEPT * total)
    high = max(-(-int(lengths[min(whole, len(lengths) - 1)]) // STEP), row_length // STEP + 1)
    low = row_length // STEP + 1

    def keeps_enough(steps: int) -> bool:
        losses = Losses()
        cut(steps * STEP, losses)
        return _lost(losses).tokens <= (1 - KEPT) * total

    # Where sequences are dropped whole, no shorter row will do.
    while low < high and spec.overflow != "drop":
        middle = (low + high) // 2
        low, high = (low, middle) if keeps_enough(middle) else (middle + 1, high)
    return high * STEP
