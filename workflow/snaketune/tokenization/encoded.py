"""Many encoded conversations, laid end to end."""

from dataclasses import dataclass

import numpy as np

from snaketune.tokenization.ragged import gather, offsets_of


@dataclass(frozen=True)
class Sequences:
    """Encoded conversations, laid end to end.

    Attributes:
        ids: int32[t].
        offsets: int64[n + 1], of the conversations.
        learned: bool[t], the tokens where loss is taken.
        turn_ends: bool[t], the control tokens that end a turn.
    """

    ids: np.ndarray
    offsets: np.ndarray
    learned: np.ndarray
    turn_ends: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """int64[n]."""
        return self.offsets[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64[n]."""
        return np.diff(self.offsets)

    def rows(self, rows: np.ndarray) -> "Sequences":
        """Some of them, in the order asked for."""
        return self.pieces(self.starts[rows], self.lengths[rows])

    def pieces(self, starts: np.ndarray, lengths: np.ndarray) -> "Sequences":
        """Stretches of tokens as sequences of their own; int64[m] each."""
        at, offsets = gather(starts, lengths)
        return Sequences(self.ids[at], offsets, self.learned[at], self.turn_ends[at])


def concatenated(parts: list[Sequences]) -> Sequences:
    """All sequences of all parts, in order."""
    return Sequences(
        np.concatenate([part.ids for part in parts]),
        offsets_of(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.learned for part in parts]),
        np.concatenate([part.turn_ends for part in parts]),
    )
