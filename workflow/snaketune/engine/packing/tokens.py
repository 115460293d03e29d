"""Tokenized sequences, of which rows are planned and built: on disk (`tokenization.token_store`) or in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class IdViews:
    """The ids of all sequences of a split; sequence `first[b] + i` is row i of batch b.

    Attributes:
        values, offsets: per batch, int32[t], and int64[rows + 1], of the rows in them.
        first: int64[batches + 1], the number of sequences before each batch, and in total.
    """

    values: list[np.ndarray]
    offsets: list[np.ndarray]
    first: np.ndarray

    def locations(self) -> tuple[np.ndarray, np.ndarray]:
        """The batch of each sequence, int32[n], and its start in the batch's values, int64[n]."""
        batch = np.repeat(np.arange(len(self.values), dtype=np.int32), np.diff(self.first))
        return batch, np.concatenate([np.empty(0, np.int64), *(offsets[:-1] for offsets in self.offsets)])


class Tokens(Protocol):
    """Sequences by split; `tokenization.token_store` describes the columns of the index."""

    def index(self, split: str, columns: list[str] | None = None) -> pa.Table: ...

    def tables(self, split: str, columns: list[str]) -> Iterator[pa.Table]:
        """Yield the index in order, some ten thousand sequences at a time."""
        ...

    def weighted(self, split: str) -> bool:
        """Whether the supervised runs of a split have weights."""
        ...

    def lists(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists as int32 or float32 values, concatenated, and int64[n + 1] offsets."""
        ...

    def views(self, split: str) -> IdViews: ...

    def release(self) -> None:
        """Release the memory of mapped pages; views stay valid and read the pages again."""
        ...
