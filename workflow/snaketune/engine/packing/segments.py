"""Segments: which tokens of a packed row attend to which, and the positions, masks and kernel inputs that follow from it.

A row is a list of segments. A segment's sequence is its prefix and its own tokens; the prefix is the beginning of another
segment's sequence, so segments form trees. A token attends causally to its sequence. The attention mask of one preference
pair with prompt ab, chosen CD and rejected EF, packed as segments [abCD][EF] with prefix_lengths [0, 2] and
prefix_segments [0, 0] (query down, key across):

          a b C D E F      position   predicted from
        a x . . . . .          0      -
        b x x . . . .          1      a
        C x x x . . .          2      b
        D x x x x . .          3      C
        E x x . . x .          2      b      <- the prompt is computed once, and both continue it
        F x x . . x x          3      E

SFT rows are segments without prefixes. Several completions of one prompt are a tree in which every token is stored once. With
completions CDE, CDF, CG and CDE again of the prompt ab, the segments are [abCDE][F][G], prefix_lengths [0, 4, 3]:

        a - b - C - D - E     completions, by the segment that each ends with: 0, 1, 2, 0
                |   ` - F     prefix_segments [0, 0, 0]; H after abCDF would see five tokens of segment 1
                ` - G

The padding at a row's end is a segment of its own, so that shapes stay the same and no other token attends to it; its positions
are all 0, since some models scale positions by the largest one in the batch. The cost is a few microseconds per segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from snaketune.engine.packing.ragged import gather
from snaketune.errors import SnaketuneError

# Varlen kernels get padding in segments of at most so many tokens: attention costs the square of a segment's length.
PADDING_SEGMENT = 128


@dataclass(frozen=True, kw_only=True)
class SegmentLayout:
    """The segments of B concatenated rows (T tokens in all, S segments, D of them documents).

    The pair of the picture with two tokens of padding, a b C D E F . . in one row of eight:

        starts [0, 4, 6]   prefix_segments [0, 0, 2]   segment_of [0, 0, 0, 0, 1, 1, 2, 2]   documents [0, 1]
        lengths [4, 2, 2]  prefix_lengths  [0, 2, 0]   positions  [0, 1, 2, 3, 2, 3, 0, 0]   parents [-1, 0, 1, 2, 1, 4, -1, 6]

    All arrays are int64.

    Attributes:
        starts, lengths: [S], the range of each segment's own tokens.
        prefix_segments, prefix_lengths: [S], the prefix of each segment: so many leading tokens of that segment's sequence
            (the segment itself and 0 if it has none).
        documents: [D], the segments that hold packed tokens; the others are padding.
        segment_of, positions: [T], the segment of each token, and its position id; 0 for padding.
        parents: [T], the token that each token is predicted from, or -1.
        completions: [C], of preferences, the segment that each completion ends with.
    """

    starts: np.ndarray
    lengths: np.ndarray
    prefix_segments: np.ndarray
    prefix_lengths: np.ndarray
    documents: np.ndarray
    segment_of: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    completions: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def document_tokens(self) -> int:
        return int(self.lengths[self.documents].sum())

    @property
    def document_of(self) -> np.ndarray:
        """int64[T]: the number of each token's document, -1 for padding."""
        number_S = np.full(len(self.starts), -1)
        number_S[self.documents] = np.arange(len(self.documents))
        return number_S[self.segment_of]

    @cached_property
    def trees(self) -> np.ndarray:
        """int64[S]: the number of each segment's tree, -1 for padding; a document that shares nothing is a tree, too."""
        number_S = np.full(len(self.starts), -1)
        roots = self.documents[self.prefix_lengths[self.documents] == 0]
        number_S[roots] = np.arange(len(roots))
        for segment in np.flatnonzero(self.prefix_lengths):
            number_S[segment] = number_S[self.prefix_segments[segment]]
        return number_S

    @property
    def prefixed(self) -> bool:
        return bool(self.prefix_lengths.any())

    @cached_property
    def sequence_lengths(self) -> np.ndarray:
        """int64[S]: tokens of each segment including its prefix."""
        return self.prefix_lengths + self.lengths

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest document with its prefix; 0 if there is none."""
        return int(self.sequence_lengths[self.documents].max(initial=0))

    def sequence_tokens(self, segments: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The tokens at `columns` of the sequences of `segments`, which begin with the prefix; shapes broadcast.

        >>> tree = layout([[5, 1, 1]], [[0, 4, 5]], row_lengths=[7], prefix_segments=[[0, 0, 1]])
        >>> tree.sequence_tokens(np.array(2), np.arange(6)).tolist()
        [0, 1, 2, 3, 5, 6]
        """
        segments, columns = np.broadcast_arrays(segments, columns)
        above = columns < self.prefix_lengths[segments]
        # Each iteration climbs one level of the tree.
        while above.any():
            segments = np.where(above, self.prefix_segments[segments], segments)
            above = columns < self.prefix_lengths[segments]
        return self.starts[segments] + columns - self.prefix_lengths[segments]

    def sequences(self) -> list[tuple[np.ndarray, int]]:
        """Return, for each document, its tokens including its prefix, int64[L], and the length of the prefix.

        >>> layout([[4, 2]], [[0, 2]], row_lengths=[8]).sequences()
        [(array([0, 1, 2, 3]), 0), (array([0, 1, 4, 5]), 2)]
        """
        tokens_Q, offsets = self.sequences_of(self.documents)
        return list(zip(np.split(tokens_Q, offsets[1:-1]), self.prefix_lengths[self.documents].tolist()))

    def sequences_of(self, segments_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the sequences of segments, concatenated, and int64[C + 1], the offsets of each in them."""
        lengths_C = self.sequence_lengths[segments_C]
        columns_Q, offsets = gather(np.zeros_like(lengths_C), lengths_C)
        return self.sequence_tokens(np.repeat(segments_C, lengths_C), columns_Q), offsets


def layout_of(rows: Sequence[Mapping[str, Any]]) -> SegmentLayout:
    """The layout of rows as `packing.reader` returns them."""
    names = ("segment_lengths", "prefix_lengths", "prefix_segments", "completions")
    columns = {name: [row[name] for row in rows] for name in names if name in rows[0]}
    return layout(**columns, row_lengths=[len(row["input_ids"]) for row in rows])


def layout(
    segment_lengths: Sequence[Sequence[int]],
    prefix_lengths: Sequence[Sequence[int]],
    row_lengths: Sequence[int],
    prefix_segments: Sequence[Sequence[int]] | None = None,
    completions: Sequence[Sequence[int]] | None = None,
) -> SegmentLayout:
    """The layout of a batch of rows.

    Args:
        segment_lengths, prefix_lengths, prefix_segments, completions: for each row, the columns of the shard; if
            prefix_segments is None, a prefix is of the row's last segment without a prefix.
        row_lengths: tokens of each row, with padding.
    Raises:
        SnaketuneError: segments longer than the row, or a prefix with nothing before it or longer than that.

    >>> pair = layout([[4, 2]], [[0, 2]], row_lengths=[8])
    >>> pair.positions.tolist()
    [0, 1, 2, 3, 2, 3, 0, 0]
    >>> pair.parents.tolist()
    [-1, 0, 1, 2, 1, 4, -1, 6]
    """
    # Start, length, prefix segment and prefix length of each segment.
    segments: list[tuple[int, int, int, int]] = []
    documents: list[int] = []
    ends_with: list[int] = []
    end = 0
    rows = zip(segment_lengths, prefix_lengths, row_lengths, strict=True)
    for row, (own_lengths, own_prefixes, row_length) in enumerate(rows):
        start, end, first, base = end, end + row_length, len(segments), len(segments)
        for number, (length, prefix) in enumerate(zip(own_lengths, own_prefixes, strict=True), first):
            if not prefix:
                base = number
            parent = (
                base if prefix_segments is None or not prefix else first + int(prefix_segments[row][number - first])
            )
            available = segments[parent][1] + segments[parent][3] if first <= parent < number else 0
            if length < 1 or prefix > available:
                raise SnaketuneError(
                    f"row {row} of the batch: a segment of {length} tokens with a prefix of {prefix} tokens, but the sequence "
                    f"that the prefix is of has {available}"
                )
            documents.append(number)
            segments.append((start, length, parent, prefix))
            start += length
        if start > end:
            raise SnaketuneError(
                f"row {row} of the batch: its segments have {start - end + row_length} tokens, in a row of {row_length}"
            )
        if start < end:
            segments.append((start, end - start, len(segments), 0))
        if completions is not None:
            ends_with += [first + int(own) for own in completions[row]]
    start_S, length_S, parent_S, prefix_S = np.array(segments, np.int64).reshape(-1, 4).T.copy()
    segment_of_T = np.repeat(np.arange(len(start_S)), length_S)
    index_T = np.arange(len(segment_of_T))
    is_document_S = np.zeros(len(start_S), bool)
    is_document_S[documents] = True
    batch = SegmentLayout(
        starts=start_S,
        lengths=length_S,
        prefix_segments=parent_S,
        prefix_lengths=prefix_S,
        documents=np.array(documents, np.int64),
        segment_of=segment_of_T,
        positions=(index_T - (start_S - prefix_S)[segment_of_T]) * is_document_S[segment_of_T],
        parents=index_T - 1,
        completions=np.array(ends_with, np.int64),
    )
    prefixed = np.flatnonzero(prefix_S)
    batch.parents[start_S] = -1
    batch.parents[start_S[prefixed]] = batch.sequence_tokens(prefixed, prefix_S[prefixed] - 1)
    return batch


def mask(rows: SegmentLayout) -> np.ndarray:
    """bool[T, T], True if the query (first axis) attends to the key: the slow reference for every kernel."""
    visible = np.tril(rows.segment_of[:, None] == rows.segment_of)
    for segment in np.flatnonzero(rows.prefix_lengths):
        start, prefix = rows.starts[segment], rows.sequence_tokens(segment, np.arange(rows.prefix_lengths[segment]))
        visible[start : start + rows.lengths[segment], prefix] = True
    return visible


def varlen_keys(rows: SegmentLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys and the cumulative lengths of queries and keys for kernels that take sequences of various lengths.

    Queries are the T tokens in order; keys are those of every segment with its prefix (int64[U], prefixes repeated). A kernel
    aligns the last query of a segment with its last key (bottom-right):

        queries   a b C D   E F          cu_q  [0, 4, 6]
        keys      a b C D   a b E F      cu_k  [0, 4, 8]

    Padding, which nothing reads, is cut into S' segments of at most PADDING_SEGMENT tokens; lengths are int32[S' + 1].

    >>> keys, cu_q, cu_k = varlen_keys(layout([[4, 2]], [[0, 2]], row_lengths=[6]))
    >>> keys.tolist(), cu_q.tolist(), cu_k.tolist()
    ([0, 1, 2, 3, 0, 1, 4, 5], [0, 4, 6], [0, 4, 8])
    >>> varlen_keys(layout([[4]], [[0]], row_lengths=[300]))[1].tolist()
    [0, 4, 132, 260, 300]
    """
    keys_U, _ = rows.sequences_of(np.arange(len(rows.starts)))
    return keys_U, _cumulative(rows, rows.lengths), _cumulative(rows, rows.sequence_lengths)


def _cumulative(rows: SegmentLayout, lengths_S: np.ndarray) -> np.ndarray:
    """The cumulative lengths of the segments, int32, with padding cut into segments of PADDING_SEGMENT."""
    ends_S = np.cumsum(lengths_S)
    padding = np.setdiff1d(np.arange(len(lengths_S)), rows.documents)
    cuts = [np.arange(ends_S[one] - lengths_S[one], ends_S[one], PADDING_SEGMENT) for one in padding]
    return np.unique(np.concatenate([[0], ends_S, *cuts])).astype(np.int32)
