"""Encoded conversations: one with what assistants say in it, and many laid end to end with where loss is taken."""

from dataclasses import dataclass

import numpy as np

from snaketune.tokenization.ragged import gather, offsets_of


@dataclass(frozen=True)
class Encoded:
    """A conversation's ids (int32[n]) and, per assistant turn, the tokens [start, end) that it says, its end included."""

    ids: np.ndarray
    spans: list[tuple[int, int]]

    @property
    def supervised(self) -> np.ndarray:
        """bool[n]: the tokens of all of its spans."""
        return self.mask(self.spans)

    def mask(self, spans: list[tuple[int, int]]) -> np.ndarray:
        """bool[n]: the tokens of these of the spans."""
        mask = np.zeros(len(self.ids), bool)
        for start, end in spans:
            mask[start:end] = True
        return mask


@dataclass(frozen=True)
class EncodedBatch:
    """n encoded conversations of t tokens, laid end to end.

    Attributes:
        ids: int32[t].
        offsets: int64[n + 1], of the conversations.
        supervised: bool[t], the tokens where loss is taken.
        ends_turn: bool[t], the control tokens that end a turn.
    """

    ids: np.ndarray
    offsets: np.ndarray
    supervised: np.ndarray
    ends_turn: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """int64[n]."""
        return self.offsets[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]."""
        return np.diff(self.offsets)

    def rows(self, rows: np.ndarray) -> "EncodedBatch":
        """Some of them, in the order asked for."""
        return self.pieces(self.starts[rows], self.lengths[rows])

    def pieces(self, starts: np.ndarray, lengths: np.ndarray) -> "EncodedBatch":
        """Stretches of tokens as conversations of their own; int64[m] each."""
        at, offsets = gather(starts, lengths)
        return EncodedBatch(self.ids[at], offsets, self.supervised[at], self.ends_turn[at])


def concatenated(parts: list[EncodedBatch]) -> EncodedBatch:
    """All conversations of all parts, in order; of no parts, none."""
    parts = [EncodedBatch(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool), np.zeros(0, bool)), *parts]
    return EncodedBatch(
        np.concatenate([part.ids for part in parts]),
        offsets_of(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.supervised for part in parts]),
        np.concatenate([part.ends_turn for part in parts]),
    )
