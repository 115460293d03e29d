"""Intervals of few values have their nominal coverage, or there is none."""

import math

import numpy as np
import pytest

from snaketune.evaluation.score_intervals import MIN_VALUES, mean_interval, per_token_interval, student, t_interval


@pytest.mark.parametrize("size", [5, 6, 8, 12, 30])
def test_the_interval_of_a_mean_has_its_coverage(size):
    random, draws = np.random.default_rng(0), 5000
    held = dict.fromkeys(("mean", "tokens", "stderr"), 0)
    for _ in range(draws):
        values = random.normal(3.0, 2.0, size).tolist()
        stderr = float(np.std(values, ddof=1)) / math.sqrt(size)
        for name, (low, high) in {
            "mean": mean_interval(values),
            "tokens": per_token_interval([10 * value for value in values], [10] * size),
            "stderr": t_interval(float(np.mean(values)), stderr, size),
        }.items():
            held[name] += low <= 3.0 <= high
    assert all(0.94 <= found / draws <= 0.96 for found in held.values()), held


@pytest.mark.parametrize("size", range(1, MIN_VALUES))
def test_too_few_values_give_no_interval(size):
    values = [float(number) for number in range(size)]
    assert mean_interval(values) is None
    assert per_token_interval(values, [1] * size) is None
    assert t_interval(0.5, 0.1, size, share=True) is None


@pytest.mark.parametrize(("freedom", "known"), [(4, 2.776), (7, 2.365), (29, 2.045), (999, 1.962)])
def test_students_t_equals_published_tables(freedom, known):
    assert student(freedom) == pytest.approx(known, rel=3e-3)
