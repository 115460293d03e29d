"""Segments: who attends to whom in a packed row, and everything that follows from it, in one place.

A row is a list of segments. A segment attends causally to itself and, if it has a prefix, to the leading tokens of the
row's last unprefixed segment. The attention mask of one preference pair with prompt ab, chosen CD and rejected EF, packed
as segments [abCD][EF] with prefix_lengths [0, 2] (query down, key across):

          a b C D E F      position   predicted from
        a x . . . . .          0      -
        b x x . . . .          1      a
        C x x x . . .          2      b
        D x x x x . .          3      C
        E x x . . x .          2      b      <- the prompt is computed once, and both continue it
        F x x . . x x          3      E

SFT rows are segments without prefixes. K pairs with one prompt share it: [abCD][EF][GH][IJ] with prefix_lengths
[0, 2, 2, 2]. The free tokens at a row's end form a segment of their own, so that shapes stay the same and nothing sees
them; all of them have position 0, since some models scale positions by the largest one in the batch. All arrays here are
numpy; the cost is a few microseconds per segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from snaketune.errors import SnaketuneError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The segments of B rows, the rows laid end to end (T tokens in all, S segments).

    Attributes:
        starts, lengths: int64[S], where a segment's own tokens are.
        prefix_starts, prefix_lengths: int64[S], where its prefix is (length 0: none).
        positions: int64[T], position ids; 0 for free tokens.
        parents: int64[T], the token that each token is predicted from, or -1.
        segment_of: int64[T], the segment that each token belongs to.
        longest: tokens of the longest segment with its prefix, free tokens at rows' ends not counted.
    """

    starts: np.ndarray
    lengths: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    segment_of: np.ndarray
    longest: int

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def mask(self) -> np.ndarray:
        """bool[T, T], True where the query (first axis) may see the key: the slow reference for every kernel."""
        own = self.segment_of[:, None] == self.segment_of[None, :]
        index = np.arange(self.tokens)
        own &= index[:, None] >= index[None, :]
        prefix_start = self.prefix_starts[self.segment_of][:, None]
        prefix_end = prefix_start + self.prefix_lengths[self.segment_of][:, None]
        return own | ((index[None, :] >= prefix_start) & (index[None, :] < prefix_end))


def layout(
    segment_lengths: Sequence[Sequence[int]], prefix_lengths: Sequence[Sequence[int]], row_lengths: Sequence[int]
) -> Layout:
    """Lay out rows.

    Args:
        segment_lengths, prefix_lengths: for each row, the two columns of the shard.
        row_lengths: tokens of each row, free ones counted.
    Raises:
        SnaketuneError: segments longer than the row, or a prefix with nothing before it or longer than that.

    The pair of the module's picture, with two free tokens after it:

    >>> pair = layout([[4, 2]], [[0, 2]], row_lengths=[8])
    >>> pair.positions.tolist()
    [0, 1, 2, 3, 2, 3, 0, 0]
    >>> pair.parents.tolist()
    [-1, 0, 1, 2, 1, 4, -1, 6]
    """
    starts, lengths, prefix_starts, prefixes, free = [], [], [], [], []
    longest = end = 0
    for row, (row_segments, row_prefixes, row_length) in enumerate(
        zip(segment_lengths, prefix_lengths, row_lengths, strict=True)
    ):
        at, end = end, end + row_length
        base_start = base_length = 0
        for length, prefix in zip(row_segments, row_prefixes, strict=True):
            if length < 1 or prefix > base_length:
                raise SnaketuneError(
                    f"row {row} of the batch: a segment of {length} tokens with a prefix of {prefix}, but the segment "
                    f"that the prefix belongs to has {base_length}"
                )
            if not prefix:
                base_start, base_length = at, length
            starts.append(at)
            lengths.append(length)
            prefix_starts.append(base_start if prefix else at)
            prefixes.append(prefix)
            free.append(False)
            longest = max(longest, prefix + length)
            at += length
        if at > end:
            raise SnaketuneError(
                f"row {row} of the batch: segments of {at - end + row_length} tokens, row of {row_length}"
            )
        if at < end:
            starts.append(at)
            lengths.append(end - at)
            prefix_starts.append(at)
            prefixes.append(0)
            free.append(True)
    start_S, length_S = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
    prefix_start_S, prefix_S = np.array(prefix_starts, dtype=np.int64), np.array(prefixes, dtype=np.int64)
    segment_of_T = np.repeat(np.arange(len(start_S)), length_S)
    index_T = np.arange(len(segment_of_T))
    positions_T = np.where(np.array(free)[segment_of_T], 0, index_T - start_S[segment_of_T] + prefix_S[segment_of_T])
    parents_T = index_T - 1
    parents_T[start_S] = np.where(prefix_S > 0, prefix_start_S + prefix_S - 1, -1)
    return Layout(
        starts=start_S,
        lengths=length_S,
        prefix_starts=prefix_start_S,
        prefix_lengths=prefix_S,
        positions=positions_T,
        parents=parents_T,
        segment_of=segment_of_T,
        longest=longest,
    )


@dataclass(frozen=True)
class CausalBucket:
    """Segments of similar length as one rectangle for a plain causal kernel.

    Attributes:
        tokens: int64[n, W], for each segment its prefix and its own tokens, then token 0 up to the width W. Causality alone
            keeps real tokens from seeing what is appended.
    """

    tokens: np.ndarray


def causal_buckets(rows: Layout, waste: float = 0.25) -> tuple[list[CausalBucket], np.ndarray]:
    """Group segments into rectangles, so that a kernel is called once per group and not once per segment.

    Args:
        waste: a segment joins a group if it leaves at most this share of the group's width empty.
    Returns:
        The groups, and `where`: int64[T], for every token its place in the groups' tokens laid end to end.

    A prefixed segment runs its prefix's queries again and throws the result away; for that, causality is the whole mask.

    >>> groups, where = causal_buckets(layout([[4, 2]], [[0, 2]], row_lengths=[6]))
    >>> groups[0].tokens.tolist(), where.tolist()
    ([[0, 1, 2, 3], [0, 1, 4, 5]], [0, 1, 2, 3, 6, 7])
    """
    full_S = rows.prefix_lengths + rows.lengths
    longest_first = np.argsort(-full_S, kind="stable")
    where = np.empty(rows.tokens, dtype=np.int64)
    buckets = []
    offset = 0
    begin = 0
    sorted_full = full_S[longest_first]
    while begin < len(longest_first):
        width = int(sorted_full[begin])
        # sorted_full falls, so the first segment that is too short ends the group.
        size = int(np.searchsorted(-sorted_full[begin:], -(1 - waste) * width, side="right"))
        group = longest_first[begin : begin + max(size, 1)]
        column_W = np.arange(width)
        prefix_n1 = rows.prefix_lengths[group][:, None]
        tokens_nW = np.where(
            column_W < prefix_n1,
            rows.prefix_starts[group][:, None] + column_W,
            rows.starts[group][:, None] + column_W - prefix_n1,
        )
        real_nW = column_W < full_S[group][:, None]
        own_nW = real_nW & (column_W >= prefix_n1)
        where[tokens_nW[own_nW]] = offset + np.flatnonzero(own_nW)
        buckets.append(CausalBucket(np.where(real_nW, tokens_nW, 0)))
        offset += tokens_nW.size
        begin += len(group)
    return buckets, where
