"""The layout of segments, on hand-made pictures and on random rows against a slow definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.errors import SnaketuneError
from snaketune.packing.segments import causal_buckets, layout

PICTURE = """
x.....
xx....
xxx...
xxxx..
xx..x.
xx..xx
"""


def test_mask_of_a_pair_is_the_picture_in_the_docstring():
    mask = layout([[4, 2]], [[0, 2]], row_lengths=[6]).mask()
    assert ["".join("x" if seen else "." for seen in row) for row in mask] == PICTURE.split()


@st.composite
def rows(draw):
    """Rows of 24 tokens: some segments alone, some with prefixes into the last unprefixed one."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        lengths, prefixes, free, base = [], [], 24, 0
        while free and draw(st.booleans()):
            length = draw(st.integers(1, free))
            prefix = draw(st.integers(0, base)) if base else 0
            base = base if prefix else length
            lengths.append(length)
            prefixes.append(prefix)
            free -= length
        made.append((lengths, prefixes))
    return made


@given(rows())
def test_parents_and_positions_follow_from_the_mask(made):
    placed = layout([r[0] for r in made], [r[1] for r in made], row_lengths=[24] * len(made))
    mask = placed.mask()
    free = np.concatenate([np.arange(24) >= sum(lengths) for lengths, _ in made])
    for token in range(placed.tokens):
        seen = np.flatnonzero(mask[token])
        # A token's position is how many tokens it sees besides itself, and its parent is the last of those.
        assert placed.positions[token] == (0 if free[token] else len(seen) - 1)
        assert seen[-1] == token
        assert placed.parents[token] == (seen[-2] if len(seen) > 1 else -1)


@given(rows())
def test_causal_buckets_show_every_token_what_the_mask_shows(made):
    placed = layout([r[0] for r in made], [r[1] for r in made], row_lengths=[24] * len(made))
    buckets, where = causal_buckets(placed)
    seen_at = []
    for bucket in buckets:
        for tokens in bucket.tokens:
            seen_at += [tokens[: column + 1].tolist() for column in range(len(tokens))]
    mask = placed.mask()
    for token in range(placed.tokens):
        assert seen_at[where[token]] == np.flatnonzero(mask[token]).tolist()


def test_rows_that_overflow_or_point_nowhere_are_refused():
    with pytest.raises(SnaketuneError, match="row of 4"):
        layout([[3, 2]], [[0, 0]], row_lengths=[4])
    with pytest.raises(SnaketuneError, match="prefix of 3"):
        layout([[2, 2]], [[0, 3]], row_lengths=[8])


def test_rows_of_several_lengths_lie_end_to_end():
    placed = layout([[3], [2, 2], [1]], [[0], [0, 0], [0]], row_lengths=[4, 4, 2])
    assert placed.tokens == 10
    assert placed.starts.tolist() == [0, 3, 4, 6, 8, 9]
    assert placed.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0, 0]


def test_pairs_with_one_prompt_all_see_it_and_nothing_of_each_other():
    mask = layout([[4, 2, 1, 2]], [[0, 2, 2, 2]], row_lengths=[9]).mask()
    for start, stop in ((4, 6), (6, 7), (7, 9)):
        seen = mask[stop - 1].nonzero()[0].tolist()
        assert seen == [0, 1, *range(start, stop)]
