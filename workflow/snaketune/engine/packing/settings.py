"""How sequences are packed into rows."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """
    Attributes:
        lengths: row lengths in tokens, ascending.
        strategy: `none` makes a row of each sequence, for a trainer that doesn't pack.
        overflow: what happens to sequences that are longer than a row.
    """

    kind: Literal["sft", "preference", "unpaired"]
    lengths: tuple[int, ...]
    strategy: Literal["best-fit-decreasing", "wrapped", "none"] = "best-fit-decreasing"
    overflow: Literal["drop", "truncate", "split", "raise"] = "drop"
    order: str = "shuffled"
