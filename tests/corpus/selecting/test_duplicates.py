"""Rows with the same hash, and groups of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snaketune.corpus.selecting.duplicates import Groups, first_occurrence


@given(st.lists(st.integers(0, 5)))
def test_first_occurrence(hashes):
    assert first_occurrence(np.array(hashes, np.uint64)).tolist() == [hashes.index(found) for found in hashes]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19))))
def test_groups_are_those_that_pairs_connect(pairs):
    groups = Groups(np.arange(20))
    together = {row: {row} for row in range(20)}
    for a, b in pairs:
        groups.join(a, b)
        both = together[a] | together[b]
        together |= dict.fromkeys(both, both)
    first = groups.first()
    assert first.tolist() == [min(together[row]) for row in range(20)]
    not_joined = groups.not_joined(np.array([(a, b) for a in range(20) for b in range(20)]))
    assert {(a, b) for a, b in not_joined.tolist()} >= {
        (a, b) for a in range(20) for b in range(20) if first[a] != first[b]
    }
