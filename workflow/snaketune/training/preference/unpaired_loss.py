"""Losses of single completions, each desirable or not. One value per row.

A row stands as a pair: its completion, and that of another row after the same prompt, which was never meant for it. How likely
those are to the policy, beside the reference, is how far it has moved as a whole (KTO's reference point).
"""

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference.dpo_loss import Pairs


def reference_point(pairs: Pairs) -> torch.Tensor:
    """Mean log-ratio of the mismatched completions of a whole step, not below 0: an estimate, without gradients, of the KL
    divergence of the policy from its reference (Ethayarajh et al., 2024, section 4.1)."""
    return pairs.ratios_P2[:, 1].detach().mean().clamp(min=0)


def kto(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """KTO (Ethayarajh et al., 2024, eq. 8): weight * (1 - sigmoid(beta * (log-ratio - reference point))) of desirable
    completions, with the sign turned of undesirable ones.

    Args:
        pairs: all of a step.

    >>> rows = Pairs(logps_P2=torch.tensor([[1.0, 1.0], [1.0, 1.0]]), reference_P2=torch.zeros(2, 2),
    ...              counts_P2=torch.ones(2, 2), nll_P2=torch.zeros(2, 2), desirable_P=torch.tensor([True, False]))
    >>> kto(rows, PreferenceLoss(loss="kto", desirable_weight=3.0)).tolist()
    [1.5, 0.5]
    """
    return _weighted(pairs, told, pairs.ratios_P2[:, 0] - reference_point(pairs))


def apo_zero_unpaired(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """APO-zero of single completions (D'Oosterlinck et al., 2024, eq. 7): KTO's with the reference point at 0."""
    return _weighted(pairs, told, pairs.ratios_P2[:, 0])


def _weighted(pairs: Pairs, told: PreferenceLoss, over_P: torch.Tensor) -> torch.Tensor:
    desirable_P = pairs.desirable_P
    signed_P = torch.where(desirable_P, over_P, -over_P)
    weight_P = torch.where(desirable_P, told.desirable_weight, told.undesirable_weight)
    return weight_P * (1 - torch.sigmoid(told.beta * signed_P))
