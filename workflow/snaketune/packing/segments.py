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
numpy; the cost is a few microseconds per segment. `packing.visibility` tells kernels of it in the forms that they take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from snaketune.errors import SnaketuneError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The segments of B rows, the rows laid end to end (T tokens in all, S segments, D of them documents).

    The pair of the picture with two free tokens after it, a b C D E F . . in one row of eight:

        starts [0, 4, 6]   prefix_starts  [0, 0, 6]   segment_of [0, 0, 0, 0, 1, 1, 2, 2]   documents [0, 1]
        lengths [4, 2, 2]  prefix_lengths [0, 2, 0]   positions  [0, 1, 2, 3, 2, 3, 0, 0]   parents [-1, 0, 1, 2, 1, 4, -1, 6]

    Attributes:
        starts, lengths: int64[S], where a segment's own tokens are.
        prefix_starts, prefix_lengths: int64[S], where its prefix is (length 0: none).
        documents: int64[D], the segments that hold what was packed; the others are free tokens.
        segment_of: int64[T], the segment that each token belongs to.
        positions: int64[T], position ids; 0 for free tokens.
        parents: int64[T], the token that each token is predicted from, or -1.
    """

    starts: np.ndarray
    lengths: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray
    documents: np.ndarray
    segment_of: np.ndarray
    positions: np.ndarray
    parents: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def document_tokens(self) -> int:
        """Tokens without the free ones."""
        return int(self.lengths[self.documents].sum())

    @property
    def document_of(self) -> np.ndarray:
        """int64[T]: the number of the document that each token belongs to, -1 for free tokens."""
        number_S = np.full(len(self.starts), -1)
        number_S[self.documents] = np.arange(len(self.documents))
        return number_S[self.segment_of]

    @property
    def prefixed(self) -> bool:
        """Whether segments share prefixes."""
        return bool(self.prefix_lengths.any())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64[S]: tokens of each segment with its prefix."""
        return self.prefix_lengths + self.lengths

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document with its prefix; 0 if there is none."""
        return int(self.sequence_lengths[self.documents].max(initial=0))

    @cached_property
    def widest(self) -> int:
        """The same of all segments."""
        return int(self.sequence_lengths.max())

    def sequence_tokens(self, segments: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The tokens at `columns` of the sequences of `segments`, which begin with the prefix; shapes broadcast."""
        own = columns - self.prefix_lengths[segments]
        return np.where(own < 0, self.prefix_starts[segments] + columns, self.starts[segments] + own)

    def sequences(self) -> list[tuple[np.ndarray, int]]:
        """What the documents stand for, one by one: the tokens of each with its prefix, int64[L], and the prefix's length.

        >>> layout([[4, 2]], [[0, 2]], row_lengths=[8]).sequences()
        [(array([0, 1, 2, 3]), 0), (array([0, 1, 4, 5]), 2)]
        """
        return [
            (self.sequence_tokens(one, np.arange(self.sequence_lengths[one])), int(self.prefix_lengths[one]))
            for one in self.documents
        ]


def layout_of(rows: Sequence[Mapping[str, Any]]) -> Layout:
    """Lay out rows as `packing.reader` gives them."""
    return layout(
        [row["segment_lengths"] for row in rows],
        [row["prefix_lengths"] for row in rows],
        row_lengths=[len(row["input_ids"]) for row in rows],
    )


def layout(
    segment_lengths: Sequence[Sequence[int]], prefix_lengths: Sequence[Sequence[int]], row_lengths: Sequence[int]
) -> Layout:
    """Lay out rows.

    Args:
        segment_lengths, prefix_lengths: for each row, the two columns of the shard.
        row_lengths: tokens of each row, free ones counted.
    Raises:
        SnaketuneError: segments longer than the row, or a prefix with nothing before it or longer than that.

    >>> pair = layout([[4, 2]], [[0, 2]], row_lengths=[8])
    >>> pair.positions.tolist()
    [0, 1, 2, 3, 2, 3, 0, 0]
    >>> pair.parents.tolist()
    [-1, 0, 1, 2, 1, 4, -1, 6]
    """
    starts, lengths, prefix_starts, prefixes, free = [], [], [], [], []
    end = 0
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
    free_S = np.array(free)
    segment_of_T = np.repeat(np.arange(len(start_S)), length_S)
    index_T = np.arange(len(segment_of_T))
    positions_T = np.where(free_S[segment_of_T], 0, index_T - start_S[segment_of_T] + prefix_S[segment_of_T])
    parents_T = index_T - 1
    parents_T[start_S] = np.where(prefix_S > 0, prefix_start_S + prefix_S - 1, -1)
    return Layout(
        starts=start_S,
        lengths=length_S,
        prefix_starts=prefix_start_S,
        prefix_lengths=prefix_S,
        documents=np.flatnonzero(~free_S),
        segment_of=segment_of_T,
        positions=positions_T,
        parents=parents_T,
    )
