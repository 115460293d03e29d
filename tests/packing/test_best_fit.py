"""Best-fit-decreasing: against the textbook algorithm, its bounds, and determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.engine.packing.best_fit import lower_bound_rows, plan_best_fit_decreasing

CAPACITY = 40


def textbook(lengths: list[int], capacities: list[int]) -> list[int]:
    """Return the capacities of the rows that best-fit-decreasing opens, one sequence at a time."""
    free: list[int] = []
    opened: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - length)
        else:
            opened.append(next(capacity for capacity in capacities if capacity >= length))
            free.append(opened[-1] - length)
    return opened


@given(st.lists(st.integers(1, CAPACITY), max_size=120))
def test_every_sequence_is_packed_once_and_rows_equal_the_textbook(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_best_fit_decreasing(lengths, [CAPACITY])
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[plan.row(r)].sum() <= CAPACITY for r in range(plan.rows))
    assert plan.rows == len(textbook(lengths.tolist(), [CAPACITY]))
    assert plan.rows >= lower_bound_rows(lengths, CAPACITY)


def test_long_tailed_lengths_fill_rows_almost_completely():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(120), 1.0, 50_000).astype(int), 1, 2048)
    plan = plan_best_fit_decreasing(lengths, [2048])
    assert lengths.sum() / (plan.rows * 2048) > 0.999


def test_a_length_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match=r"0\.\.40, found 5\.\.41"):
        plan_best_fit_decreasing(np.array([5, 41]), [CAPACITY])


@given(st.lists(st.integers(1, CAPACITY), max_size=120))
def test_rows_of_two_lengths(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    plan = plan_best_fit_decreasing(lengths, [CAPACITY // 4, CAPACITY])
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert all(0 < lengths[plan.row(r)].sum() <= plan.capacities[r] for r in range(plan.rows))
    assert plan.capacities.tolist() == sorted(textbook(lengths.tolist(), [CAPACITY // 4, CAPACITY]))


def test_supervised_tokens_are_balanced_over_the_rows_without_more_rows():
    capacity, random = 512, np.random.default_rng(1)
    lengths = np.clip(random.lognormal(np.log(capacity / 16), 1.0, 300_000).astype(np.int32), 1, capacity)
    supervised = (lengths * random.uniform(0, 1, len(lengths))).astype(np.int32)
    plain = plan_best_fit_decreasing(lengths, [capacity])
    balanced = plan_best_fit_decreasing(lengths, [capacity], supervised)
    assert balanced.rows == plain.rows
    spreads = [np.add.reduceat(supervised[plan.order], plan.offsets[:-1]).std() for plan in (plain, balanced)]
    assert spreads[1] < 0.85 * spreads[0]
    again = plan_best_fit_decreasing(lengths, [capacity], supervised)
    assert (again.order == balanced.order).all()
