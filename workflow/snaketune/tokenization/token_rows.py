"""Encoded conversations and pairs as the rows that are stored: a pair's prompt once, and where loss is taken as runs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.tokenization.encoded import Sequences
from snaketune.tokenization.ragged import first_in_rows, gather, offsets_of


@dataclass(frozen=True)
class TokenRows:
    """n sequences as they are written.

    Attributes:
        names: strings, the ids of the corpus' rows.
        sequences: whose first tokens aren't learned.
        prompt, chosen: int64[n].
        prompt_hash: uint64[n].
        control_text: bool[n].
    """

    names: pa.StringArray
    sequences: Sequences
    prompt: np.ndarray
    chosen: np.ndarray
    prompt_hash: np.ndarray
    control_text: np.ndarray

    @cached_property
    def learned(self) -> tuple[np.ndarray, np.ndarray]:
        """What `learned_runs` gives."""
        return learned_runs(self.sequences)

    @cached_property
    def supervised(self) -> np.ndarray:
        """int64[n]: learned tokens."""
        runs, offsets = self.learned
        return np.diff(offsets_of(runs[1::2] - runs[::2])[offsets // 2])


def of_conversations(names: pa.StringArray, sequences: Sequences, control_text: np.ndarray) -> TokenRows:
    """Rows of n encoded conversations."""
    _first_unlearned(sequences, sequences.starts, sequences.lengths)
    none = np.zeros(len(names), np.int64)
    return TokenRows(names, sequences, none, none, none.astype(np.uint64), control_text)


def of_pairs(names: pa.StringArray, both: Sequences, control_text: np.ndarray) -> TokenRows:
    """Rows of n pairs.

    The prompt is what both conversations of a pair start with, up to the first learned token of either. A pair of which
    one completion has nothing to learn has nothing to learn.

        both    [ 3 90 5 71 2 3 91 5 72 9 2]  and  [ 3 90 5 71 2 3 91 5 72 40 41 2]
        row     [ 3 90 5 71 2 3 91 5 | 72 9 2 | 72 40 41 2],  prompt 8, chosen 3

    Args:
        both: prompt and chosen, prompt and rejected, of each pair in turn; only completions are learned.
        control_text: bool[n].
    """
    starts, lengths = both.starts.reshape(-1, 2), both.lengths.reshape(-1, 2)
    shortest = lengths.min(1)
    prompt = np.minimum(shortest, _first_learned(both).reshape(-1, 2).min(1))
    prompt = np.minimum(prompt, _shared(both.ids, starts, shortest))
    # The chosen conversation whole, then of the rejected one what comes behind the prompt.
    pieces = both.pieces(
        np.stack([starts[:, 0], starts[:, 1] + prompt], 1).reshape(-1),
        np.stack([lengths[:, 0], lengths[:, 1] - prompt], 1).reshape(-1),
    )
    _first_unlearned(pieces, pieces.starts[::2], pieces.lengths[::2])
    alone = np.flatnonzero(prompt == 0)
    _first_unlearned(pieces, pieces.starts[1::2][alone], pieces.lengths[1::2][alone])
    learned = np.diff(offsets_of(pieces.learned)[pieces.offsets]).reshape(-1, 2).min(1) > 0
    offsets = np.ascontiguousarray(pieces.offsets[::2])
    sequences = Sequences(
        pieces.ids,
        offsets,
        pieces.learned & np.repeat(learned, np.diff(offsets)),
        np.zeros(len(pieces.ids), bool),
    )
    spelled = memoryview(np.ascontiguousarray(sequences.ids)).cast("B")
    hashes = [
        xxhash.xxh3_64_intdigest(spelled[4 * start : 4 * end])
        for start, end in zip(sequences.starts.tolist(), (sequences.starts + prompt).tolist())
    ]
    return TokenRows(names, sequences, prompt, lengths[:, 0] - prompt, np.array(hashes, np.uint64), control_text)


def _first_unlearned(sequences: Sequences, starts: np.ndarray, lengths: np.ndarray) -> None:
    """The first token of a sequence has nothing before it to be predicted from."""
    sequences.learned[starts[lengths > 0]] = False


def _first_learned(both: Sequences) -> np.ndarray:
    return first_in_rows(both.learned, both.starts, both.lengths)


def _shared(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[n]: how many leading tokens two sequences of each pair share; `starts` is int64[n, 2], `lengths` int64[n]."""
    at, offsets = gather(starts[:, 0], lengths)
    different = ids[at] != ids[at + np.repeat(starts[:, 1] - starts[:, 0], lengths)]
    return first_in_rows(different, offsets[:-1], lengths)


def learned_runs(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Start, end, start, end, ... of what is learned, per sequence: int32 values and int64[n + 1] offsets."""
    learned = sequences.learned
    starts, ends = learned.copy(), learned.copy()
    starts[1:] &= ~learned[:-1]
    ends[:-1] &= ~learned[1:]
    # A run ends where its sequence does.
    filled = sequences.lengths > 0
    first, last = sequences.starts[filled], sequences.offsets[1:][filled] - 1
    starts[first], ends[last] = learned[first], learned[last]
    runs = np.stack([np.flatnonzero(starts), np.flatnonzero(ends) + 1], 1).reshape(-1)
    offsets = np.searchsorted(runs[::2], sequences.offsets) * 2
    runs -= np.repeat(sequences.starts, np.diff(offsets))
    return runs.astype(np.int32), offsets


def turn_ends(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """After how many tokens a turn is over, per sequence: int32 values and int64[n + 1] offsets."""
    places = np.flatnonzero(sequences.turn_ends)
    offsets = np.searchsorted(places, sequences.offsets)
    return (places + 1 - np.repeat(sequences.starts, np.diff(offsets))).astype(np.int32), offsets
