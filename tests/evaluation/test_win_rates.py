"""Win rates of simulated judges, whose preferences are known."""

import math

import numpy as np
import pytest

from snaketune.evaluation.win_rates import (
    MIN_LENGTH_CONTROLLED,
    PENALTY,
    bounded_mean_interval,
    length_controlled,
    win_rate,
)

BIAS = 0.1


def pairs(verdicts, lengths=(100, 100)):
    return [
        {"first": first, "second": second, "tokens": lengths[0], "opponent_tokens": lengths[1]}
        for first, second in verdicts
    ]


def judge(random, chances, ties=0.0):
    """Verdicts in both orders, shape (..., 2), of a judge that prefers what it is shown first.

    Args:
        chances: the chance that the model's response is better, of each prompt, within [BIAS / 2, 1 - BIAS / 2].
        ties: share of the verdicts that are ties.
    """
    chances = np.stack([chances + BIAS / 2, chances - BIAS / 2], axis=-1)
    verdicts = (random.random(chances.shape) < chances).astype(float)
    return np.where(random.random(chances.shape) < ties, 0.5, verdicts)


@pytest.mark.parametrize(
    ("rate", "prompts", "ties"),
    [(0.5, 200, 0), (0.6, 200, 0), (0.8, 200, 0), (0.6, 50, 0), (0.8, 50, 0), (0.8, 50, 0.4)],
)
def test_intervals_have_their_coverage(rate, prompts, ties):
    random, draws = np.random.default_rng(0), 1000
    # Prompts differ in how often the model's response is preferred.
    middle = (rate - BIAS / 2) / (1 - BIAS)
    chances = BIAS / 2 + (1 - BIAS) * random.beta(3 * middle, 3 * (1 - middle), (draws, prompts))
    found = [win_rate(pairs(verdicts)) for verdicts in judge(random, chances, ties).tolist()]
    known = {"win_rate": ties / 2 + (1 - ties) * rate, "position_bias": (1 - ties) * BIAS}
    for name, value in known.items():
        means = [result[name] for result in found]
        assert abs(np.mean(means) - value) < 3 * np.std(means) / math.sqrt(draws), name
        held = [low <= value <= high for low, high in (result[f"{name}_interval"] for result in found)]
        assert 0.93 <= np.mean(held) <= 0.97, (name, np.mean(held))


def test_each_number_of_a_few_verdicts():
    verdicts = [
        (1.0, 1.0),
        (1.0, 0.0),
        (0.0, 1.0),
        (1.0, 0.0),
        (0.0, 0.0),
        (0.5, 1.0),
        (1.0, None),
        (None, 0.0),
        (None, None),
    ]
    result = win_rate(pairs(verdicts, (30, 20)))
    low, high = result.pop("win_rate_interval")
    assert 0 < low < 0.5417 < high < 1
    low, high = result.pop("position_bias_interval")
    assert -1 < low < 0.0833 < high < 1
    assert result == {
        "prompts": 9,
        "judged": 6,
        "one_order": 2,
        "win_rate": 0.5417,
        "wins": 2,
        "ties": 3,
        "losses": 1,
        "position_bias": 0.0833,
        "inconsistent": 0.5,
        "unclear": 0.2222,
        "length_controlled": None,
        "mean_tokens": 30.0,
        "opponent_mean_tokens": 20.0,
    }


def test_position_bias_is_a_difference_of_shares_of_verdicts():
    verdicts = np.random.default_rng(0).choice([0.0, 0.5, 1.0], (100, 2), p=[0.2, 0.3, 0.5])
    first, second = verdicts.T
    shown_first, shown_second = np.sum(first == 1) + np.sum(second == 0), np.sum(first == 0) + np.sum(second == 1)
    assert win_rate(pairs(verdicts.tolist()))["position_bias"] == pytest.approx(
        (shown_first - shown_second) / 200, abs=1e-4
    )


@pytest.mark.parametrize("verdicts", [[], [(None, None)] * 20, [(1.0, None)] * 20])
def test_rates_are_none_if_no_prompt_is_judged(verdicts):
    result = win_rate(pairs(verdicts))
    assert result["prompts"] == len(verdicts)
    assert result["judged"] == result["wins"] == result["ties"] == result["losses"] == 0
    rates = (
        "win_rate",
        "win_rate_interval",
        "position_bias",
        "position_bias_interval",
        "inconsistent",
        "length_controlled",
    )
    assert all(result[name] is None for name in rates)
    assert result["unclear"] == (sum(pair.count(None) for pair in verdicts) / (2 * len(verdicts)) if verdicts else None)
    assert result["mean_tokens"] == result["opponent_mean_tokens"] == (100.0 if verdicts else None)


def test_one_prompt_has_no_interval():
    result = win_rate(pairs([(1.0, 0.5)]))
    assert (result["win_rate"], result["position_bias"], result["wins"]) == (0.75, 0.5, 1)
    assert result["win_rate_interval"] is result["position_bias_interval"] is result["length_controlled"] is None


def test_the_judge_that_always_prefers_the_first_response():
    result = win_rate(pairs([(1.0, 0.0)] * 50))
    assert (result["win_rate"], result["position_bias"], result["inconsistent"]) == (0.5, 1.0, 1.0)
    assert result["position_bias_interval"][1] == 1.0


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_the_interval_of_scores_alike_has_a_width(score):
    result = win_rate(pairs([(score, score)] * 50))
    assert result["win_rate"] == score
    low, high = result["win_rate_interval"]
    assert 0 <= low <= score <= high <= 1
    # Of 50 prompts without an exception, exceptions may be 6%: the rule of three.
    assert 0.06 < high - low < 0.08
    # One other score changes it little.
    near = win_rate(pairs([(score, score)] * 49 + [(0.5, 1.0 if score == 0.5 else 0.5)]))["win_rate_interval"]
    assert near == pytest.approx([low, high], abs=0.04)
    assert near[0] < near[1]


def test_intervals_are_symmetric():
    random = np.random.default_rng(0)
    values = random.choice([0.0, 0.5, 1.0], 60, p=[0.1, 0.2, 0.7])
    low, high = bounded_mean_interval(values.tolist(), 0.0, 1.0)
    assert bounded_mean_interval((1 - values).tolist(), 0.0, 1.0) == pytest.approx([1 - high, 1 - low], abs=1e-4)
    assert bounded_mean_interval((2 * values - 1).tolist(), -1.0, 1.0) == pytest.approx(
        [2 * low - 1, 2 * high - 1], abs=2e-4
    )


def with_lengths(random, preference):
    """2,000 comparisons in which the model's response is usually longer.

    Args:
        preference: gives the chances that the model's response is preferred, from both responses' tokens.
    """
    tokens, opponent = (
        random.lognormal(5.4, 0.5, 2000).astype(int) + 1,
        random.lognormal(4.9, 0.5, 2000).astype(int) + 1,
    )
    verdicts = judge(random, np.clip(preference(tokens, opponent), BIAS / 2, 1 - BIAS / 2))
    return [
        {"first": first, "second": second, "tokens": own, "opponent_tokens": other}
        for (first, second), own, other in zip(verdicts.tolist(), tokens.tolist(), opponent.tolist(), strict=True)
    ]


@pytest.mark.parametrize("strength", [1.5, 3.0])
def test_length_control_removes_a_preference_for_length(strength):
    # The chance is tokens^strength / (tokens^strength + opponent^strength), which isn't the form that is fitted.
    comparisons = with_lengths(
        np.random.default_rng(0), lambda tokens, opponent: 1 / (1 + (opponent / tokens) ** float(strength))
    )
    result = win_rate(comparisons)
    assert result["win_rate"] > 0.64
    assert abs(result["length_controlled"] - 0.5) < 0.05


@pytest.mark.parametrize("rate", [0.35, 0.5, 0.7])
def test_length_control_keeps_a_preference_for_quality(rate):
    result = win_rate(with_lengths(np.random.default_rng(0), lambda tokens, _: np.full(len(tokens), rate)))
    assert abs(result["length_controlled"] - result["win_rate"]) < 0.03


def newton(scores, differences):
    """The same regression by Newton's method."""
    inputs = np.column_stack([np.ones(len(scores)), np.tanh(differences / np.std(differences, ddof=1))])
    coefficients = np.zeros(2)
    for _ in range(50):
        shares = 1 / (1 + np.exp(-inputs @ coefficients))
        gradient = inputs.T @ (shares - scores) + PENALTY * coefficients
        curvature = (inputs * (shares * (1 - shares))[:, None]).T @ inputs + PENALTY * np.eye(2)
        coefficients = coefficients - np.linalg.solve(curvature, gradient)
    assert np.abs(gradient).max() < 1e-9
    return 1 / (1 + math.exp(-coefficients[0]))


@pytest.mark.parametrize("size", [10, 50, 500])
def test_the_regression_equals_newtons_method(size):
    random = np.random.default_rng(size)
    scores, differences = random.choice([0.0, 0.25, 0.5, 0.75, 1.0], size), random.integers(-200, 400, size)
    assert length_controlled(scores.tolist(), differences.tolist()) == pytest.approx(
        newton(scores, differences), abs=1e-3
    )


def test_two_lengths_have_a_closed_fit():
    """The line through the logits of both lengths, apart from the weak penalty."""
    scores, differences = [0.8] * 500 + [0.3] * 500, [100] * 500 + [-50] * 500
    long, short = np.tanh(np.array([100, -50]) / np.std(differences, ddof=1))
    logits = math.log(0.8 / 0.2), math.log(0.3 / 0.7)
    intercept = logits[0] - long * (logits[0] - logits[1]) / (long - short)
    assert length_controlled(scores, differences) == pytest.approx(1 / (1 + math.exp(-intercept)), abs=1e-3)


def test_lengths_that_separate_the_verdicts_have_a_fit():
    differences = [number for number in range(-25, 26) if number]
    assert length_controlled([float(number > 0) for number in differences], differences) == pytest.approx(0.5, abs=1e-3)


def test_wins_only_have_a_fit():
    assert 0.99 < length_controlled([1.0] * 50, list(range(-20, 30))) < 1


@pytest.mark.parametrize("differences", [[0] * 50, [7] * 50, list(range(MIN_LENGTH_CONTROLLED - 1))])
def test_too_few_or_equal_lengths_have_no_fit(differences):
    assert length_controlled([1.0, *[0.5] * (len(differences) - 1)], differences) is None
