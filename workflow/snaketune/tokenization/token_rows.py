"""Encoded conversations and pairs as stored rows: the prompt of a pair once, and supervised tokens as runs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import xxhash

from snaketune.engine.packing.ragged import first_in_rows, gather, offsets_of
from snaketune.tokenization.encoded_rows import NO_BRANCHES, EncodedBatch


@dataclass(frozen=True)
class TokenRows:
    """n sequences in the form in which they are stored; `token_store.INDEX` describes the columns.

    Attributes:
        names: the ids of the corpus rows.
        sequences: the encoded sequences, whose first tokens aren't supervised.
        prompt, chosen, common, prompt_hash, control_text: int64, uint64 and bool [n].
        source: added to rows that are stored.
        margin: of pairs, by how much the chosen completion is rated higher; None if the corpus has no ratings.
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
    margin: pa.DoubleArray | None = None

    @cached_property
    def supervised_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The supervised runs of each sequence, each of one weight, as start, end, start, end, ...: int32 values and
        int64[n + 1] offsets."""
        sequences, weights = self.sequences, self.sequences.supervised
        supervised = weights > 0
        starts, ends = supervised.copy(), supervised.copy()
        starts[1:] &= weights[1:] != weights[:-1]
        ends[:-1] &= weights[:-1] != weights[1:]
        # Runs don't continue across sequences.
        filled = sequences.lengths > 0
        first, last = sequences.starts[filled], sequences.offsets[1:][filled] - 1
        starts[first], ends[last] = supervised[first], supervised[last]
        runs = np.stack([np.flatnonzero(starts), np.flatnonzero(ends) + 1], 1).reshape(-1)
        offsets = np.searchsorted(runs[::2], sequences.offsets) * 2
        runs -= np.repeat(sequences.starts, np.diff(offsets))
        return runs.astype(np.int32), offsets

    @property
    def run_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """The weight of each supervised run: float32 values and int64[n + 1] offsets."""
        runs, offsets = self.supervised_runs
        starts = runs[::2] + np.repeat(self.sequences.starts, np.diff(offsets) // 2)
        return self.sequences.supervised[starts].astype(np.float32), offsets // 2

    @cached_property
    def supervised_tokens(self) -> np.ndarray:
        """int64[n]: the number of supervised tokens."""
        runs, offsets = self.supervised_runs
        return np.diff(offsets_of(runs[1::2] - runs[::2])[offsets // 2])

    @property
    def turn_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The ends of turns of each sequence, in tokens: int32 values and int64[n + 1] offsets."""
        ends = np.flatnonzero(self.sequences.ends_turn)
        offsets = np.searchsorted(ends, self.sequences.offsets)
        return (ends + 1 - np.repeat(self.sequences.starts, np.diff(offsets))).astype(np.int32), offsets

    @property
    def branches(self) -> tuple[np.ndarray, np.ndarray]:
        """The branches of each sequence, flat: int32 values and int64[n + 1] offsets."""
        branches = self.sequences.branches or ()
        counts = [sequence_branches.size for sequence_branches in branches] or [0] * len(self.names)
        return np.concatenate([NO_BRANCHES, *branches]).reshape(-1), offsets_of(np.array(counts, np.int64))


def rows_of(table: pa.Table, encoded: EncodedBatch, control_text: np.ndarray) -> TokenRows:
    """The rows of a corpus table, given its encoded turns (`turn_columns.turns_of`).

    Args:
        control_text: bool, for each encoded conversation whether a text in it contains the string of a control token.
    """
    names = names_of(table)
    if "chosen" in table.column_names:
        return pair_rows(names, encoded, control_text.reshape(-1, 2).any(1))
    if "label" in table.column_names:
        return completion_rows(names, encoded, table["label"].combine_chunks(), control_text)
    return conversation_rows(names, encoded, control_text)


def names_of(table: pa.Table) -> pa.StringArray:
    """Strings[n], the ids of a corpus table."""
    return table["id"].cast(pa.string()).combine_chunks()


def conversation_rows(names: pa.StringArray, sequences: EncodedBatch, control_text: np.ndarray) -> TokenRows:
    _unsupervise_first(sequences, sequences.starts, sequences.lengths)
    zeros = np.zeros(len(names), np.int64)
    return TokenRows(
        names, sequences, zeros, zeros, zeros, zeros.astype(np.uint64), pa.nulls(len(names), pa.bool_()), control_text
    )


def completion_rows(
    names: pa.StringArray, sequences: EncodedBatch, label: pa.BooleanArray, control_text: np.ndarray
) -> TokenRows:
    """The rows of n prompts, each with a completion; a prompt ends before the first supervised token."""
    prompt = first_in_rows(sequences.supervised, sequences.starts, sequences.lengths)
    _unsupervise_first(sequences, sequences.starts, sequences.lengths)
    hashes, chosen = _prompt_hashes(sequences, prompt), sequences.lengths - prompt
    return TokenRows(names, sequences, prompt, chosen, np.zeros_like(prompt), hashes, label, control_text)


def pair_rows(names: pa.StringArray, both: EncodedBatch, control_text: np.ndarray) -> TokenRows:
    """The rows of n pairs.

    The prompt is what both conversations of a pair start with, up to the first supervised token of either. If nothing is
    supervised in one of the completions, nothing is supervised in the pair.

        both    [ 3 90 5 71 2 3 91 5 72 9 2]  and  [ 3 90 5 71 2 3 91 5 72 40 41 2]
        row     [ 3 90 5 71 2 3 91 5 | 72 9 2 | 72 40 41 2],  prompt 8, chosen 3, common 1

    Args:
        both: the encoded prompt + chosen and prompt + rejected of each pair in turn; only completions are supervised.
    """
    starts, lengths = both.starts.reshape(-1, 2), both.lengths.reshape(-1, 2)
    # The leading tokens that both sequences of a pair share in id and supervision.
    at, offsets = gather(starts[:, 0], lengths.min(1))
    other = at + np.repeat(starts[:, 1] - starts[:, 0], lengths.min(1))
    different = (both.ids[at] != both.ids[other]) | (both.supervised[at] != both.supervised[other])
    shared = first_in_rows(different, offsets[:-1], lengths.min(1))
    prompt = np.minimum(shared, first_in_rows(both.supervised, both.starts, both.lengths).reshape(-1, 2).min(1))
    # The whole chosen conversation, then the rejected one without the prompt.
    parts = both.slices(
        np.stack([starts[:, 0], starts[:, 1] + prompt], 1).reshape(-1),
        np.stack([lengths[:, 0], lengths[:, 1] - prompt], 1).reshape(-1),
    )
    _unsupervise_first(parts, parts.starts[::2], parts.lengths[::2])
    alone = np.flatnonzero(prompt == 0)
    _unsupervise_first(parts, parts.starts[1::2][alone], parts.lengths[1::2][alone])
    supervised = np.diff(offsets_of(parts.supervised)[parts.offsets]).reshape(-1, 2).min(1) > 0
    offsets = np.ascontiguousarray(parts.offsets[::2])
    supervised = parts.supervised & np.repeat(supervised, np.diff(offsets))
    sequences = EncodedBatch(parts.ids, offsets, supervised, np.zeros(len(parts.ids), bool))
    hashes, chosen = _prompt_hashes(sequences, prompt), lengths[:, 0] - prompt
    return TokenRows(
        names, sequences, prompt, chosen, shared - prompt, hashes, pa.nulls(len(names), pa.bool_()), control_text
    )


def insert_empty_rows(rows: TokenRows, indices: np.ndarray, names: pa.StringArray) -> TokenRows:
    """Rows for a table with the ids `names`: `rows` at `indices`, ascending, and sequences without tokens elsewhere."""
    number = np.full(len(names), -1)
    number[indices] = np.arange(len(indices))
    positions = pa.array(number, mask=number < 0)

    branches = rows.sequences.branches

    def expand(values: np.ndarray) -> np.ndarray:
        return np.append(values, np.zeros(1, values.dtype))[number]

    columns = {
        name: expand(getattr(rows, name)) for name in ("prompt", "chosen", "common", "prompt_hash", "control_text")
    }
    return replace(
        rows,
        names=names,
        sequences=replace(
            rows.sequences,
            offsets=offsets_of(expand(rows.sequences.lengths)),
            branches=branches and tuple(branches[at] if at >= 0 else NO_BRANCHES for at in number.tolist()),
        ),
        label=rows.label.take(positions),
        source=None if rows.source is None else rows.source.take(positions),
        margin=None if rows.margin is None else rows.margin.take(positions),
        **columns,
    )


def _prompt_hashes(sequences: EncodedBatch, prompt: np.ndarray) -> np.ndarray:
    """uint64[n], hashes of the first `prompt` ids of each sequence."""
    data = memoryview(np.ascontiguousarray(sequences.ids)).cast("B")
    ranges = zip((4 * sequences.starts).tolist(), (4 * (sequences.starts + prompt)).tolist())
    return np.array([xxhash.xxh3_64_intdigest(data[start:end]) for start, end in ranges], np.uint64)


def _unsupervise_first(sequences: EncodedBatch, starts: np.ndarray, lengths: np.ndarray) -> None:
    """Unmark the first token of each sequence, in place: it has no token to be predicted from."""
    sequences.supervised[starts[lengths > 0]] = False
