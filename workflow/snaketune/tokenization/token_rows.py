"""Encoded conversations and pairs as the rows that are stored: a pair's prompt once, and where loss is taken as runs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.tokenization.encoded_rows import EncodedBatch
from snaketune.tokenization.ragged import first_in_rows, gather, offsets_of


@dataclass(frozen=True)
class TokenRows:
    """n sequences as they are written.

    Attributes:
        names: strings, the ids of the corpus' rows.
        sequences: whose first tokens aren't supervised.
        prompt, chosen, common: int64[n].
        prompt_hash: uint64[n].
        label: bools, null where nothing has one.
        control_text: bool[n].
        source: int16s, the numbers of their sources; None where these don't matter.
    """

    names: pa.StringArray
    sequences: EncodedBatch
    prompt: np.ndarray
    chosen: np.ndarray
    common: np.ndarray
    prompt_hash: np.ndarray
    label: pa.BooleanArray
    control_text: np.ndarray
    source: pa.Int16Array | None = None

    @cached_property
    def supervised_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Start, end, start, end, ... of what is supervised, per sequence: int32 values and int64[n + 1] offsets."""
        sequences, supervised = self.sequences, self.sequences.supervised
        starts, ends = supervised.copy(), supervised.copy()
        starts[1:] &= ~supervised[:-1]
        ends[:-1] &= ~supervised[1:]
        # A run ends where its sequence does.
        filled = sequences.lengths > 0
        first, last = sequences.starts[filled], sequences.offsets[1:][filled] - 1
        starts[first], ends[last] = supervised[first], supervised[last]
        runs = np.stack([np.flatnonzero(starts), np.flatnonzero(ends) + 1], 1).reshape(-1)
        offsets = np.searchsorted(runs[::2], sequences.offsets) * 2
        runs -= np.repeat(sequences.starts, np.diff(offsets))
        return runs.astype(np.int32), offsets

    @cached_property
    def supervised_tokens(self) -> np.ndarray:
        """int64[n]: how many tokens are supervised."""
        runs, offsets = self.supervised_runs
        return np.diff(offsets_of(runs[1::2] - runs[::2])[offsets // 2])

    @property
    def turn_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """After how many tokens a turn is over, per sequence: int32 values and int64[n + 1] offsets."""
        places = np.flatnonzero(self.sequences.ends_turn)
        offsets = np.searchsorted(places, self.sequences.offsets)
        return (places + 1 - np.repeat(self.sequences.starts, np.diff(offsets))).astype(np.int32), offsets


def of_conversations(names: pa.StringArray, sequences: EncodedBatch, control_text: np.ndarray) -> TokenRows:
    """Rows of n encoded conversations."""
    _unsupervise_first(sequences, sequences.starts, sequences.lengths)
    none = np.zeros(len(names), np.int64)
    return TokenRows(names, sequences, none, none, none, none.astype(np.uint64), _no_labels(names), control_text)


def of_completions(
    names: pa.StringArray, sequences: EncodedBatch, label: pa.BooleanArray, control_text: np.ndarray
) -> TokenRows:
    """Rows of n prompts with a completion each; a prompt ends where its completion is first supervised."""
    prompt = first_in_rows(sequences.supervised, sequences.starts, sequences.lengths)
    _unsupervise_first(sequences, sequences.starts, sequences.lengths)
    hashes, chosen = _prompt_hashes(sequences, prompt), sequences.lengths - prompt
    return TokenRows(names, sequences, prompt, chosen, np.zeros_like(prompt), hashes, label, control_text)


def of_pairs(names: pa.StringArray, both: EncodedBatch, control_text: np.ndarray) -> TokenRows:
    """Rows of n pairs.

    The prompt is what both conversations of a pair start with, up to the first supervised token of either. A pair of
    which one completion has nothing supervised has nothing supervised.

        both    [ 3 90 5 71 2 3 91 5 72 9 2]  and  [ 3 90 5 71 2 3 91 5 72 40 41 2]
        row     [ 3 90 5 71 2 3 91 5 | 72 9 2 | 72 40 41 2],  prompt 8, chosen 3, common 1

    Args:
        both: prompt and chosen, prompt and rejected, of each pair in turn; only completions are supervised.
        control_text: bool[n].
    """
    starts, lengths = both.starts.reshape(-1, 2), both.lengths.reshape(-1, 2)
    shortest = lengths.min(1)
    prompt = np.minimum(shortest, first_in_rows(both.supervised, both.starts, both.lengths).reshape(-1, 2).min(1))
    shared = _shared(both, starts, shortest)
    prompt = np.minimum(prompt, shared)
    # The chosen conversation whole, then of the rejected one what comes after the prompt.
    pieces = both.pieces(
        np.stack([starts[:, 0], starts[:, 1] + prompt], 1).reshape(-1),
        np.stack([lengths[:, 0], lengths[:, 1] - prompt], 1).reshape(-1),
    )
    _unsupervise_first(pieces, pieces.starts[::2], pieces.lengths[::2])
    alone = np.flatnonzero(prompt == 0)
    _unsupervise_first(pieces, pieces.starts[1::2][alone], pieces.lengths[1::2][alone])
    supervised = np.diff(offsets_of(pieces.supervised)[pieces.offsets]).reshape(-1, 2).min(1) > 0
    offsets = np.ascontiguousarray(pieces.offsets[::2])
    sequences = EncodedBatch(
        pieces.ids,
        offsets,
        pieces.supervised & np.repeat(supervised, np.diff(offsets)),
        np.zeros(len(pieces.ids), bool),
    )
    hashes, chosen = _prompt_hashes(sequences, prompt), lengths[:, 0] - prompt
    return TokenRows(names, sequences, prompt, chosen, shared - prompt, hashes, _no_labels(names), control_text)


def spread(rows: TokenRows, kept: np.ndarray, names: pa.StringArray) -> TokenRows:
    """Rows at their places among all rows of a table, each of the others a sequence without tokens.

    Args:
        kept: int64[n], where each row stands, ascending.
        names: ids of all rows.
    """

    def placed(values: np.ndarray) -> np.ndarray:
        found = np.zeros(len(names), values.dtype)
        found[kept] = values
        return found

    places = np.zeros(len(names), np.int64)
    places[kept] = np.arange(len(kept))
    others = np.ones(len(names), bool)
    others[kept] = False
    taken = pa.array(places, mask=others)
    return TokenRows(
        names,
        replace(rows.sequences, offsets=offsets_of(placed(rows.sequences.lengths))),
        placed(rows.prompt),
        placed(rows.chosen),
        placed(rows.common),
        placed(rows.prompt_hash),
        rows.label.take(taken),
        placed(rows.control_text),
        rows.source and rows.source.take(taken),
    )


def _no_labels(names: pa.StringArray) -> pa.BooleanArray:
    return pa.nulls(len(names), pa.bool_())


def _prompt_hashes(sequences: EncodedBatch, prompt: np.ndarray) -> np.ndarray:
    """uint64[n]: of the first `prompt` ids of each sequence."""
    spelled = memoryview(np.ascontiguousarray(sequences.ids)).cast("B")
    hashes = [
        xxhash.xxh3_64_intdigest(spelled[4 * start : 4 * end])
        for start, end in zip(sequences.starts.tolist(), (sequences.starts + prompt).tolist())
    ]
    return np.array(hashes, np.uint64)


def _unsupervise_first(sequences: EncodedBatch, starts: np.ndarray, lengths: np.ndarray) -> None:
    """The first token of a sequence has nothing before it to be predicted from."""
    sequences.supervised[starts[lengths > 0]] = False


def _shared(both: EncodedBatch, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[n]: with how many tokens two sequences of each pair begin, of which the same are supervised.

    Args:
        starts: int64[n, 2].
        lengths: int64[n], of the shorter ones.
    """
    at, offsets = gather(starts[:, 0], lengths)
    other = at + np.repeat(starts[:, 1] - starts[:, 0], lengths)
    different = (both.ids[at] != both.ids[other]) | (both.supervised[at] != both.supervised[other])
    return first_in_rows(different, offsets[:-1], lengths)
