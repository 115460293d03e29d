"""Win rates of a model against an opponent, from a judge's verdicts on both responses to the same prompts.

The judge sees each pair in both orders, as it may prefer the response that it is shown first (Zheng et al., Judging
LLM-as-a-Judge, 2023). Over both orders that cancels out. A prompt with only one readable verdict keeps the bias, so only
prompts with two count.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from snaketune.evaluation.score_intervals import MIN_VALUES, Z, student, wilson

# With fewer judged prompts, the effects of length and quality can't be separated.
MIN_LENGTH_CONTROLLED = 10
# Weight of the squared coefficients, relative to one prompt. Without it, verdicts that lengths separate have no finite fit.
PENALTY = 0.01


def win_rate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The model's win rate and how far the judge's verdicts can be trusted. Rates are None if no prompt is judged.

    Args:
        rows: of each prompt, the verdicts where the model's response was shown `first` and `second` (1 for it, 0 for the
            opponent's, 0.5 for a tie, None if unreadable), and the lengths of both responses, `tokens` and `opponent_tokens`.
    Returns:
        prompts: number of rows.
        judged: number of prompts with two readable verdicts. The entries below are of these prompts, unless they name others.
        one_order: number of prompts with one readable verdict.
        win_rate: mean score of the prompts, where a prompt's score is the mean of its verdicts.
        win_rate_interval: 95% interval of the win rate over prompts; None for fewer than five.
        wins, ties, losses: number of prompts with a score above, at and below 0.5.
        position_bias: share of verdicts for the response shown first minus that for the one shown second, in [-1, 1].
        position_bias_interval: 95% interval of the bias over prompts; None for fewer than five.
        inconsistent: share of prompts of which each verdict names another response.
        unclear: share of the verdicts on all prompts that are unreadable.
        length_controlled: the win rate if both responses had one length, by `length_controlled`.
        mean_tokens, opponent_mean_tokens: mean length of the responses to all prompts.
    """
    readable = [(row, [verdict for verdict in (row["first"], row["second"]) if verdict is not None]) for row in rows]
    judged = [(row, *verdicts) for row, verdicts in readable if len(verdicts) == 2]
    scores = [(first + second) / 2 for _, first, second in judged]
    # The response shown first wins by first = 1 and by second = 0, that shown second by first = 0 and by second = 1. So their
    # difference is (2 first - 1) + (1 - 2 second) over two verdicts, of which a tie's part is 0.
    biases = [first - second for _, first, second in judged]
    unclear = sum(2 - len(verdicts) for _, verdicts in readable)
    return {
        "prompts": len(rows),
        "judged": len(judged),
        "one_order": sum(len(verdicts) == 1 for _, verdicts in readable),
        "win_rate": _mean(scores),
        "win_rate_interval": bounded_mean_interval(scores, 0.0, 1.0),
        "wins": sum(score > 0.5 for score in scores),
        "ties": sum(score == 0.5 for score in scores),
        "losses": sum(score < 0.5 for score in scores),
        "position_bias": _mean(biases),
        "position_bias_interval": bounded_mean_interval(biases, -1.0, 1.0),
        "inconsistent": _mean([abs(bias) == 1 for bias in biases]),
        "unclear": round(unclear / (2 * len(rows)), 4) if rows else None,
        "length_controlled": length_controlled(scores, [row["tokens"] - row["opponent_tokens"] for row, *_ in judged]),
        "mean_tokens": _mean([row["tokens"] for row in rows]),
        "opponent_mean_tokens": _mean([row["opponent_tokens"] for row in rows]),
    }


def bounded_mean_interval(values: Sequence[float], low: float, high: float) -> list[float] | None:
    """The interval of the mean of values in [low, high]; None for fewer than five.

    >>> bounded_mean_interval([0.0, 0.5, 1.0, 1.0] * 10, 0.0, 1.0), bounded_mean_interval([1.0] * 40, 0.0, 1.0)
    ([0.4865, 0.7457], [0.9124, 1.0])
    >>> bounded_mean_interval([0.0] * 40, -1.0, 1.0), bounded_mean_interval([0.0] * 4, -1.0, 1.0)
    ([-0.0876, 0.0876], None)
    """
    size = len(values)
    if size < MIN_VALUES:
        return None
    mean = math.fsum(values) / size
    variance = math.fsum((value - mean) ** 2 for value in values) / (size - 1)
    if min(values) == max(values):
        # Values alike say nothing about their spread, but Wilson's interval limits the share of others, all of them at one end.
        others = wilson(0.0, size)[1]
        bounds = (mean - others * (mean - low), mean + others * (high - mean))
    else:
        # Wilson's interval, at the number of yes-or-no values whose mean would have this variance. It is skewed, as win rates
        # near 0 or 1 are: that of Student's t covers 91% there (20 prompts, a win rate of 0.8) to 93% (50 prompts, 0.9). The
        # last factor widens it to Student's quantile, as the variance is estimated.
        share = (mean - low) / (high - low)
        effective = size * share * (1 - share) * (high - low) ** 2 / variance * (Z / student(size - 1)) ** 2
        bounds = tuple(low + (high - low) * bound for bound in wilson(share, round(effective)))
    return [round(bound, 4) for bound in bounds]


def length_controlled(scores: Sequence[float], differences: Sequence[int]) -> float | None:
    """The win rate at equal lengths, in the way of AlpacaEval 2 (Dubois et al., Length-Controlled AlpacaEval, 2024).

    A logistic regression predicts a prompt's score from an intercept and tanh(difference / standard deviation of the
    differences); the intercept alone is the prediction at equal lengths. AlpacaEval's third term, the difficulty of an
    instruction, needs many models that are judged on the same prompts, so it is left out. AlpacaEval also counts characters,
    not tokens, and chooses the strength of an L1 penalty by cross-validation, where this is a weak L2 penalty.

    Where the model's responses are nearly all longer, or nearly all shorter, this extrapolates.

    Args:
        differences: the model's minus the opponent's tokens, of each prompt.

    Returns:
        None for fewer than ten prompts, or if all differ by the same number of tokens.

    >>> length_controlled([1.0, 1.0, 1.0, 0.0] * 5, [30, 20, 10, -10] * 5), length_controlled([1.0] * 10, [5] * 10)
    (0.5178, None)
    """
    if len(scores) < MIN_LENGTH_CONTROLLED or min(differences) == max(differences):
        return None
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import expit

    # The differences aren't centered: zero must remain equal length.
    inputs = np.column_stack([np.ones(len(scores)), np.tanh(np.array(differences) / np.std(differences, ddof=1))])
    targets = np.array(scores)

    def loss(coefficients):
        logits = inputs @ coefficients
        value = np.sum(np.logaddexp(0.0, logits) - targets * logits) + PENALTY / 2 * coefficients @ coefficients
        return value, inputs.T @ (expit(logits) - targets) + PENALTY * coefficients

    intercept, _ = minimize(loss, np.zeros(2), jac=True).x
    return round(float(expit(intercept)), 4)


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 4) if values else None
