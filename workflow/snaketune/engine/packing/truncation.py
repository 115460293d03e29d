"""Sequences and tokens that are lost because rows are too short, and the row length that would avoid it."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.settings import PackingSettings

# Reasons to drop that long enough rows avoid.
TOO_SHORT = (
    "longer_than_row",
    "prompt_fills_row",
    "equal_completions_in_a_row",
    "nothing_supervised_in_a_row",
    "nothing_supervised_in_a_piece",
)
WORTH_A_WARNING = 0.02
# The share of the tokens that the advised row length retains.
RETAINED = 0.99
STEP = 64
LENGTHS = ["length", "supervised", "common"]


@dataclass
class DropCounts:
    """Counts of what was dropped (by reason), truncated and split, in sequences and in tokens."""

    dropped_rows: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    split_rows: int = 0
    split_pieces: int = 0

    def drop(self, reason: str, rows: int, tokens: int) -> None:
        """Count dropped sequences and tokens; `rows` is 0 if only a part of a sequence is dropped."""
        if rows or tokens:
            self.dropped_rows[reason] += rows
            self.dropped_tokens[reason] += tokens

    @property
    def too_long(self) -> dict[str, int]:
        """The sequences dropped or cut, and the tokens lost, because rows are too short."""
        return {
            "rows": sum(self.dropped_rows[reason] for reason in TOO_SHORT) + self.truncated_rows,
            "tokens": sum(self.dropped_tokens[reason] for reason in TOO_SHORT) + self.truncated_tokens,
        }

    def cut(self) -> dict[str, dict[str, int]]:
        """What is truncated and split, for the manifest."""
        return {
            "truncated": {"rows": self.truncated_rows, "tokens": self.truncated_tokens},
            "split": {"rows": self.split_rows, "pieces": self.split_pieces},
        }


def lost_to_length(
    settings: PackingSettings,
    row_length: int,
    tables: Iterable[pa.Table],
    drops: DropCounts,
    read: dict[str, int],
    fit: Callable[[int, DropCounts], object],
) -> dict[str, int | None]:
    """What is lost in rows of `row_length` tokens: rows, tokens, and `enough`, the shortest row length, in multiples of
    STEP, that retains RETAINED of the tokens; None if the loss isn't worth a warning.

    Args:
        tables: the split's token index, of which the columns LENGTHS are read.
        drops: the counts of fitting it to this length.
        read: rows and tokens of the split.
        fit: fits all sequences of the split to rows of so many tokens, and updates the counts.
    """
    lost = drops.too_long
    if not is_worth_a_warning(lost["rows"], lost["tokens"], read["rows"], read["tokens"]):
        return lost | {"enough": None}
    # The tokens of the supervised sequences that fit into 0, 1, 2... steps, and into no less.
    by_steps = np.zeros(0, np.int64)
    for table in tables:
        lengths = (table["length"].to_numpy() - table["common"].to_numpy())[table["supervised"].to_numpy() > 0]
        more = np.bincount(-(-lengths // STEP), lengths, minlength=len(by_steps)).astype(np.int64)
        more[: len(by_steps)] += by_steps
        by_steps = more
    total = int(by_steps.sum())
    low = row_length // STEP + 1
    # An upper bound: the row length at which the sequences that fit whole are enough.
    high = max(int(np.searchsorted(np.cumsum(by_steps), RETAINED * total)), low)

    def is_enough(steps: int) -> bool:
        own = DropCounts()
        fit(steps * STEP, own)
        return own.too_long["tokens"] <= (1 - RETAINED) * total

    # If long sequences are dropped whole, the upper bound is the answer.
    if settings.overflow != "drop":
        high = low + bisect_left(range(low, high), True, key=is_enough)
    return lost | {"enough": high * STEP}


def is_worth_a_warning(rows: int, tokens: int, all_rows: int, all_tokens: int) -> bool:
    """Whether more than WORTH_A_WARNING of the rows or of the tokens are lost."""
    return rows > WORTH_A_WARNING * all_rows or tokens > WORTH_A_WARNING * all_tokens


def warning(split: str, unit: str, row_length: int, overflow: str, lost: dict[str, Any], read: dict[str, int]) -> str:
    """The warning about lost tokens, or "" if the loss isn't worth one.

    Args:
        lost: the result of `lost_to_length`.
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
