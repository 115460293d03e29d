"""Encoded conversations: a single one with its assistant spans, and a batch with its loss mask."""

from dataclasses import dataclass

import numpy as np

from snaketune.tokenization.ragged import gather, offsets_of


@dataclass(frozen=True)
class Encoded:
    """An encoded conversation of n tokens.

    Attributes:
        ids: int32[n].
        spans: for each assistant turn, its supervised tokens [start, end), including the end of turn.
    """

    ids: np.ndarray
    spans: list[tuple[int, int]]

    @property
    def supervised(self) -> np.ndarray:
        """bool[n]: the tokens of all spans."""
        return self.mask(self.spans)

    def mask(self, spans: list[tuple[int, int]]) -> np.ndarray:
        """Return bool[n], the tokens of the given spans."""
        mask = np.zeros(len(self.ids), bool)
        for start, end in spans:
            mask[start:end] = True
        return mask


@dataclass(frozen=True)
class EncodedBatch:
    """n encoded conversations of t tokens in total, concatenated.

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
        """int64[n], the start of each conversation."""
        return self.offsets[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64[n], the tokens of each conversation."""
        return np.diff(self.offsets)

    def rows(self, rows: np.ndarray) -> "EncodedBatch":
        """Return some of the conversations, in the given order."""
        return self.slices(self.starts[rows], self.lengths[rows])

    def slices(self, starts: np.ndarray, lengths: np.ndarray) -> "EncodedBatch":
        """Return token ranges as conversations of their own; starts and lengths are int64[m]."""
        at, offsets = gather(starts, lengths)
        return EncodedBatch(self.ids[at], offsets, self.supervised[at], self.ends_turn[at])


def concatenated(parts: list[EncodedBatch]) -> EncodedBatch:
    """Return the conversations of all parts, in order; an empty batch for no parts."""
    parts = [EncodedBatch(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool), np.zeros(0, bool)), *parts]
    return EncodedBatch(
        np.concatenate([part.ids for part in parts]),
        offsets_of(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.supervised for part in parts]),
        np.concatenate([part.ends_turn for part in parts]),
    )
