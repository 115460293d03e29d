"""Who sees whom in packed rows, in the forms that attention kernels take: a mask, rectangles, or keys with their lengths.

All are of the same `Layout`; the picture of a packed pair in `packing.segments` is the one meant here too.
"""

import numpy as np

from snaketune.packing.segments import Layout

# The share of a rectangle's width that a segment in it may leave empty.
WASTE = 0.25


def mask(rows: Layout) -> np.ndarray:
    """bool[T, T], True where the query (first axis) may see the key: the slow reference for every kernel."""
    own = rows.segment_of[:, None] == rows.segment_of[None, :]
    index = np.arange(rows.tokens)
    own &= index[:, None] >= index[None, :]
    prefix_start = rows.prefix_starts[rows.segment_of][:, None]
    prefix_end = prefix_start + rows.prefix_lengths[rows.segment_of][:, None]
    return own | ((index[None, :] >= prefix_start) & (index[None, :] < prefix_end))


def causal_buckets(rows: Layout) -> tuple[list[np.ndarray], np.ndarray]:
    """Group segments into rectangles for a plain causal kernel, which is then called once per group.

    The pair of the picture and a document gh after it, in one rectangle of two segments and four columns, and another:

        a b C D         g h
        a b E F

    A segment joins a rectangle if it leaves at most WASTE of the width empty. Token 0 fills that up, and causality alone keeps
    real tokens from seeing it.

    A prefixed segment runs its prefix's queries again and throws the result away; for that, causality is the whole mask.

    Returns:
        The rectangles, int64[n, W] tokens each; and int64[T], each token's place in the rectangles laid end to end.

    >>> from snaketune.packing.segments import layout
    >>> rectangles, where = causal_buckets(layout([[4, 2, 2]], [[0, 2, 0]], row_lengths=[8]))
    >>> [tokens.tolist() for tokens in rectangles], where.tolist()
    ([[[0, 1, 2, 3], [0, 1, 4, 5]], [[6, 7]]], [0, 1, 2, 3, 6, 7, 8, 9])
    """
    lengths_S = rows.sequence_lengths
    longest_first = np.argsort(-lengths_S, kind="stable")
    falling_S = lengths_S[longest_first]
    where_T = np.empty(rows.tokens, dtype=np.int64)
    rectangles: list[np.ndarray] = []
    offset = begin = 0
    while begin < len(longest_first):
        width = int(falling_S[begin])
        # The lengths fall, so the first segment that is too short ends the group.
        size = int(np.searchsorted(-falling_S[begin:], -(1 - WASTE) * width, side="right"))
        group_n1 = longest_first[begin : begin + max(size, 1), None]
        column_W = np.arange(width)
        tokens_nW = rows.sequence_tokens(group_n1, column_W)
        real_nW = column_W < lengths_S[group_n1]
        own_nW = real_nW & (column_W >= rows.prefix_lengths[group_n1])
        where_T[tokens_nW[own_nW]] = offset + np.flatnonzero(own_nW)
        rectangles.append(np.where(real_nW, tokens_nW, 0))
        offset += tokens_nW.size
        begin += len(group_n1)
    return rectangles, where_T


def varlen_keys(rows: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What kernels for sequences of various lengths are told of who sees whom.

    Queries are the T tokens in their order, keys those of every segment with its prefix (U in all, prefixes again and again).
    A kernel aligns the last query of a segment with its last key, and goes back from there:

        queries   a b C D   E F          cu_q  [0, 4, 6]
        keys      a b C D   a b E F      cu_k  [0, 4, 8]

    Returns:
        int64[U], the tokens whose keys are meant; int32[S + 1] each, where a segment's queries and keys begin.

    >>> from snaketune.packing.segments import layout
    >>> keys, cu_q, cu_k = varlen_keys(layout([[4, 2]], [[0, 2]], row_lengths=[6]))
    >>> keys.tolist(), cu_q.tolist(), cu_k.tolist()
    ([0, 1, 2, 3, 0, 1, 4, 5], [0, 4, 6], [0, 4, 8])
    """
    cu_q, cu_k = (
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) for lengths in (rows.lengths, rows.sequence_lengths)
    )
    segment_U = np.repeat(np.arange(len(rows.starts)), rows.sequence_lengths)
    return rows.sequence_tokens(segment_U, np.arange(len(segment_U)) - cu_k[segment_U]), cu_q, cu_k
