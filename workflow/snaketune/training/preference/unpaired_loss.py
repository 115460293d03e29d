"""Losses of single completions that are labelled desirable or undesirable; one value per row.

A row is represented as a pair: its own completion, and the completion of another row after the same prompt (mismatched). The
mean log-ratio of the mismatched completions measures how far the policy has moved as a whole (KTO's reference point).
"""

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference.dpo_loss import PairLogps


def reference_point(pairs: PairLogps) -> torch.Tensor:
    """Mean log-ratio of the mismatched completions of a whole step, clamped at 0: an estimate of the KL divergence of the
    policy from its reference (Ethayarajh et al., 2024, section 4.1). A scalar without gradient."""
    return pairs.ratios_P2[:, 1].detach().mean().clamp(min=0)


def kto(pairs: PairLogps, settings: PreferenceLoss) -> torch.Tensor:
    """KTO (Ethayarajh et al., 2024, eq. 8): weight * (1 - sigmoid(beta * (log-ratio - reference point))), with the difference
    negated for undesirable completions.

    Args:
        pairs: all rows of a step, as the reference point is a mean over them.

    >>> rows = PairLogps(logps_P2=torch.tensor([[1.0, 1.0], [1.0, 1.0]]), reference_P2=torch.zeros(2, 2),
    ...              counts_P2=torch.ones(2, 2), nll_P2=torch.zeros(2, 2), desirable_P=torch.tensor([True, False]))
    >>> kto(rows, PreferenceLoss(loss="kto", desirable_weight=3.0)).tolist()
    [1.5, 0.5]
    """
    return _weighted(pairs, settings, pairs.ratios_P2[:, 0] - reference_point(pairs))


def apo_zero_unpaired(pairs: PairLogps, settings: PreferenceLoss) -> torch.Tensor:
    """APO-zero of single completions (D'Oosterlinck et al., 2024, eq. 7): KTO with a reference point of 0."""
    return _weighted(pairs, settings, pairs.ratios_P2[:, 0])


def _weighted(pairs: PairLogps, settings: PreferenceLoss, over_P: torch.Tensor) -> torch.Tensor:
    desirable_P = pairs.desirable_P
    signed_P = torch.where(desirable_P, over_P, -over_P)
    weight_P = torch.where(desirable_P, settings.desirable_weight, settings.undesirable_weight)
    return weight_P * (1 - torch.sigmoid(settings.beta * signed_P))
