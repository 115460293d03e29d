"""Metrics of a reward model on pairs: sums over the pairs, by source, and their means.

accuracy                            share of pairs whose chosen completion has the higher reward; equal ones count half
margin                              mean reward of the chosen completion minus that of the rejected one
chosen_reward, rejected_reward      mean rewards
sources.0/accuracy, …               each metric per source, numbered as in the config, if a corpus has several
"""

import torch

from snaketune.engine.pair_metrics import Sums, in_double, sums_by_source

SUMS = ("pairs", "right", "chosen_reward", "rejected_reward")


@torch.no_grad()
def pair_sums(rewards_P2: torch.Tensor, source_P: torch.Tensor, sources: int) -> torch.Tensor:
    """Sums over pairs, per source: float[sources, SUMS], float64 except on MPS, which lacks it.

    >>> pair_sums(torch.tensor([[2.0, 1.0], [0.5, 0.5], [1.0, 3.0]]), torch.tensor([0, 1, 0]), sources=2).tolist()
    [[2.0, 1.0, 3.0, 4.0], [1.0, 0.5, 0.5, 0.5]]
    """
    chosen_P, rejected_P = in_double(rewards_P2).unbind(1)
    right_P = (1 + (chosen_P - rejected_P).sign()) / 2
    return sums_by_source(
        torch.stack([torch.ones_like(chosen_P), right_P, chosen_P, rejected_P], dim=1), source_P, sources
    )


def means(sums: Sums) -> dict[str, float]:
    """Metrics from sums over pairs.

    >>> means({"pairs": 3.0, "right": 1.5, "chosen_reward": 3.5, "rejected_reward": 4.5})["margin"]
    -0.333333
    """
    pairs = sums["pairs"]
    if not pairs:
        return {}
    metrics = {
        "accuracy": sums["right"] / pairs,
        "margin": (sums["chosen_reward"] - sums["rejected_reward"]) / pairs,
        "chosen_reward": sums["chosen_reward"] / pairs,
        "rejected_reward": sums["rejected_reward"] / pairs,
    }
    return {name: round(value, 6) for name, value in metrics.items()}
