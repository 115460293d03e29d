"""Metrics of a reward model on pairs: sums over the pairs, by source, and their means.

accuracy                            share of pairs whose chosen completion has the higher reward; equal ones count half
margin                              mean reward of the chosen completion minus that of the rejected one
chosen_reward, rejected_reward      mean rewards
sources.0/accuracy, …               each metric per source, numbered as in the config, if a corpus has several
"""

from collections.abc import Sequence

import torch

SUMS = ("pairs", "right", "chosen_reward", "rejected_reward")


@torch.no_grad()
def pair_sums(rewards_P2: torch.Tensor, source_P: torch.Tensor, sources: int) -> torch.Tensor:
    """Sums over pairs, per source: float[sources, SUMS], float64 except on MPS, which lacks it.

    >>> pair_sums(torch.tensor([[2.0, 1.0], [0.5, 0.5], [1.0, 3.0]]), torch.tensor([0, 1, 0]), sources=2).tolist()
    [[2.0, 1.0, 3.0, 4.0], [1.0, 0.5, 0.5, 0.5]]
    """
    rewards_P2 = rewards_P2.to(torch.float32 if rewards_P2.device.type == "mps" else torch.float64)
    chosen_P, rejected_P = rewards_P2.unbind(1)
    right_P = (1 + (chosen_P - rejected_P).sign()) / 2
    columns_PK = torch.stack([torch.ones_like(chosen_P), right_P, chosen_P, rejected_P], dim=1)
    # A matrix product is deterministic on a GPU, unlike scattered additions.
    source_PS = source_P[:, None] == torch.arange(sources, device=source_P.device)
    return source_PS.to(columns_PK.dtype).T @ columns_PK


def metrics_of(sums_SK: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics from sums by source: over all pairs, and of each source if there are several.

    >>> metrics = metrics_of([[2.0, 1.0, 3.0, 4.0], [1.0, 0.5, 0.5, 0.5]])
    >>> metrics["accuracy"], metrics["margin"], metrics["sources.1/margin"]
    (0.5, -0.333333, 0.0)
    """
    metrics = _means([sum(column) for column in zip(*sums_SK)])
    for number, sums in enumerate(sums_SK if len(sums_SK) > 1 else ()):
        metrics |= {f"sources.{number}/{name}": value for name, value in _means(sums).items()}
    return metrics


def _means(sums_K: Sequence[float]) -> dict[str, float]:
    pairs, right, chosen, rejected = sums_K
    if not pairs:
        return {}
    means = {
        "accuracy": right / pairs,
        "margin": (chosen - rejected) / pairs,
        "chosen_reward": chosen / pairs,
        "rejected_reward": rejected / pairs,
    }
    return {name: round(value, 6) for name, value in means.items()}
