"""The layout of segments, on examples and on random rows against a slow definition."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.engine.packing.segments import layout, mask, varlen_keys
from snaketune.errors import SnaketuneError

PICTURE = """
x.....
xx....
xxx...
xxxx..
xx..x.
xx..xx
"""


def test_mask_of_a_pair_is_the_picture_in_the_docstring():
    seen = mask(layout([[4, 2]], [[0, 2]], row_lengths=[6]))
    assert ["".join("x" if key else "." for key in row) for row in seen] == PICTURE.split()


@st.composite
def rows(draw):
    """Rows of 24 tokens, by segment lengths, prefix lengths and prefix segments, with and without prefixes."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        lengths, prefixes, parents, free = [], [], [], 24
        while free and draw(st.booleans()):
            length = draw(st.integers(1, free))
            parent = draw(st.integers(0, len(lengths) - 1)) if lengths else 0
            prefix = draw(st.integers(0, prefixes[parent] + lengths[parent])) if lengths else 0
            parents.append(parent if prefix else len(lengths))
            lengths.append(length)
            prefixes.append(prefix)
            free -= length
        made.append((lengths, prefixes, parents))
    return made


def layout_from(made):
    lengths, prefixes, parents = zip(*made)
    return layout(lengths, prefixes, row_lengths=[24] * len(made), prefix_segments=parents)


@given(rows())
def test_parents_and_positions_follow_from_the_mask(made):
    batch = layout_from(made)
    visible = mask(batch)
    free = np.concatenate([np.arange(24) >= sum(lengths) for lengths, _, _ in made])
    for token in range(batch.tokens):
        seen = np.flatnonzero(visible[token])
        # A token's position is the number of other tokens it attends to, and its parent is the last of those.
        assert batch.positions[token] == (0 if free[token] else len(seen) - 1)
        assert seen[-1] == token
        assert batch.parents[token] == (seen[-2] if len(seen) > 1 else -1)


@given(rows())
def test_varlen_keys_cover_exactly_the_mask(made):
    batch = layout_from(made)
    all_keys, cu_q, cu_k = varlen_keys(batch)
    visible = mask(batch)
    for s, (begin, end) in enumerate(pairwise(cu_q.tolist())):
        keys = all_keys[cu_k[s] : cu_k[s + 1]].tolist()
        for query in range(begin, end):
            # Bottom-right alignment: the last query sees all keys.
            assert keys[: len(keys) - (end - 1 - query)] == np.flatnonzero(visible[query]).tolist()


@given(rows())
def test_documents_are_the_segments_of_the_columns_and_their_sequences_follow_from_the_mask(made):
    batch = layout_from(made)
    assert batch.lengths[batch.documents].tolist() == [length for lengths, _, _ in made for length in lengths]
    assert batch.document_tokens == sum(sum(lengths) for lengths, _, _ in made)
    assert batch.prefixed == any(any(prefixes) for _, prefixes, _ in made)
    sequences = batch.sequences()
    assert batch.longest == max((len(tokens) for tokens, _ in sequences), default=0)
    assert [prefix for _, prefix in sequences] == [prefix for _, prefixes, _ in made for prefix in prefixes]
    visible = mask(batch)
    for number, (tokens, prefix) in enumerate(sequences):
        assert tokens.tolist() == np.flatnonzero(visible[tokens[-1]]).tolist()
        assert (batch.document_of[tokens[prefix:]] == number).all()
        # A token's column in its own sequence is its position.
        assert batch.positions[tokens].tolist() == list(range(len(tokens)))
    assert (batch.document_of >= 0).sum() == batch.document_tokens


def test_rows_that_overflow_or_have_too_long_prefixes_are_refused():
    with pytest.raises(SnaketuneError, match="row of 4"):
        layout([[3, 2]], [[0, 0]], row_lengths=[4])
    with pytest.raises(SnaketuneError, match="prefix of 3"):
        layout([[2, 2]], [[0, 3]], row_lengths=[8])


def test_rows_of_several_lengths_are_concatenated():
    batch = layout([[3], [2, 2], [1]], [[0], [0, 0], [0]], row_lengths=[4, 4, 2])
    assert batch.tokens == 10
    assert batch.starts.tolist() == [0, 3, 4, 6, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0, 0]


def test_pairs_of_one_prompt_attend_to_it_and_not_to_each_other():
    visible = mask(layout([[4, 2, 1, 2]], [[0, 2, 2, 2]], row_lengths=[9]))
    for start, stop in ((4, 6), (6, 7), (7, 9)):
        seen = visible[stop - 1].nonzero()[0].tolist()
        assert seen == [0, 1, *range(start, stop)]
