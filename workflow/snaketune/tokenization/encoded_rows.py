"""A batch of encoded conversations, concatenated (`engine.packing.ragged`)."""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from snaketune.engine.packing.ragged import gather, offsets_of

NO_BRANCHES = np.zeros((0, 3), np.int32)


@dataclass(frozen=True)
class EncodedBatch:
    """n encoded conversations of t tokens in total, concatenated.

    Attributes:
        ids: int32[t].
        offsets: int64[n + 1], of the conversations.
        supervised: bool[t], the tokens where loss is taken; float32[t], their weights, if turns have others than 0 and 1.
        ends_turn: bool[t], the control tokens that end a turn.
        branches: for each conversation, the branches of its tree, int32[b, 3], see `encode_rows`; None if none has any.
    """

    ids: np.ndarray
    offsets: np.ndarray
    supervised: np.ndarray
    ends_turn: np.ndarray
    branches: tuple[np.ndarray, ...] | None = None

    @property
    def starts(self) -> np.ndarray:
        return self.offsets[:-1]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def rows(self, rows: np.ndarray) -> "EncodedBatch":
        batch = self.slices(self.starts[rows], self.lengths[rows])
        if self.branches is None:
            return batch
        return replace(batch, branches=tuple(self.branches[row] for row in rows.tolist()))

    def slices(self, starts: np.ndarray, lengths: np.ndarray) -> "EncodedBatch":
        """Token ranges as conversations of their own, without branches; starts and lengths are int64[m]."""
        at, offsets = gather(starts, lengths)
        return EncodedBatch(self.ids[at], offsets, self.supervised[at], self.ends_turn[at])


def concatenated(parts: list[EncodedBatch]) -> EncodedBatch:
    """The conversations of all parts, in order; an empty batch for no parts."""
    branches = None
    if any(part.branches is not None for part in parts):
        branches = tuple(chain.from_iterable(part.branches or [NO_BRANCHES] * len(part.lengths) for part in parts))
    parts = [EncodedBatch(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool), np.zeros(0, bool)), *parts]
    return EncodedBatch(
        np.concatenate([part.ids for part in parts]),
        offsets_of(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.supervised for part in parts]),
        np.concatenate([part.ends_turn for part in parts]),
        branches,
    )
