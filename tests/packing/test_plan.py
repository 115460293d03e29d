"""Best-fit-decreasing: against the textbook algorithm, its bounds, and determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.packing.plan import lower_bound_rows, plan_best_fit_decreasing

CAPACITY = 40


def textbook(lengths: list[int]) -> int:
    """Rows that best-fit-decreasing opens, one sequence at a time."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            free.append(CAPACITY - length)
    return len(free)


@given(st.lists(st.integers(1, CAPACITY), max_size=120))
def test_every_sequence_is_placed_once_and_rows_equal_the_textbook(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_best_fit_decreasing(lengths, CAPACITY)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[plan.row(r)].sum() <= CAPACITY for r in range(plan.rows))
    assert plan.rows == textbook(lengths.tolist())
    assert plan.rows >= lower_bound_rows(lengths, CAPACITY)


def test_long_tailed_lengths_fill_rows_to_the_brim():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(120), 1.0, 50_000).astype(int), 1, 2048)
    plan = plan_best_fit_decreasing(lengths, 2048)
    assert lengths.sum() / (plan.rows * 2048) > 0.999


def test_a_length_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match=r"1\.\.40, found 5\.\.41"):
        plan_best_fit_decreasing(np.array([5, 41]), CAPACITY)
