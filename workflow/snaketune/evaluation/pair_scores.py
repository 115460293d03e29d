"""Scores of held-out pairs: by how much, and how often, the chosen completion is ahead of the rejected one; with 95% intervals.

Shapes: P preference pairs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.evaluation.score_intervals import mean_interval, share_interval


def margins(pairs: pa.Table) -> dict[str, np.ndarray]:
    """By accuracy, the margin of each pair of `pairs.arrow` (`evaluation.held_out.PAIRS`), chosen less rejected, float64[P]: of
    log-probabilities, of those per token, and of rewards, which are NaN without a reference."""
    sides = ("chosen", "rejected")
    logps = [pairs[f"{side}_logp"].to_numpy() for side in sides]
    tokens = [np.maximum(pairs[f"{side}_tokens"].to_numpy(), 1) for side in sides]
    references = [pairs[f"reference_{side}_logp"].to_numpy().astype(float) for side in sides]
    return {
        "logp_accuracy": logps[0] - logps[1],
        "logp_accuracy_per_token": logps[0] / tokens[0] - logps[1] / tokens[1],
        "reward_accuracy": (logps[0] - references[0]) - (logps[1] - references[1]),
    }


def wins(margin_P: np.ndarray) -> np.ndarray:
    """float64[P]: 1 for a margin above zero, 0 below, and 0.5 for a tie."""
    return (1 + np.sign(margin_P)) / 2


def mean(name: str, values_P: np.ndarray) -> dict[str, Any]:
    """The mean, None without pairs, and its interval."""
    value = round(float(values_P.mean()), 4) if len(values_P) else None
    return {name: value, f"{name}_interval": mean_interval(values_P.tolist())}


def accuracy(name: str, margin_P: np.ndarray) -> dict[str, Any]:
    """The share of `wins`, None without pairs, and Wilson's interval."""
    share = float(wins(margin_P).mean()) if len(margin_P) else None
    return {name: None if share is None else round(share, 4), f"{name}_interval": share_interval(share, len(margin_P))}


def by_source(sources: Sequence[int], scores_of: Callable[[np.ndarray], dict[str, Any]]) -> dict[str, Any]:
    """`{"by_source": ...}`, the scores by number of the source; empty if there is only one source. Args: scores_of: the scores
    of the pairs that bool[P] chooses."""
    scores = {str(number): scores_of(np.equal(sources, number)) for number in np.unique(sources).tolist()}
    return {"by_source": scores} if len(scores) > 1 else {}
