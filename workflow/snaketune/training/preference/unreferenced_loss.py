"""Losses of pairs without a reference model: functions of the policy's log-probabilities, one value per pair.

The likelihood terms of CPO and ORPO are means over tokens, not over pairs; `step_loss` adds them.
"""

import torch
import torch.nn.functional as F

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference.dpo_loss import PairLogps, smoothed_loss

# Below this x, log1p(-exp(x)) is more accurate than log(-expm1(x)) (Mächler, 2012).
LOG_HALF = -0.6931471805599453


def cpo(pairs: PairLogps, settings: PreferenceLoss) -> torch.Tensor:
    """Preference term of CPO (Xu et al., 2024, eq. 3): the DPO loss with a uniform reference."""
    return smoothed_loss(settings.beta * (pairs.logps_P2[:, 0] - pairs.logps_P2[:, 1]), settings.label_smoothing)


def simpo(pairs: PairLogps, settings: PreferenceLoss) -> torch.Tensor:
    """SimPO (Meng et al., 2024, eq. 6): -log sigmoid(beta * difference of log-probabilities per token - gamma).

    >>> pair = PairLogps(logps_P2=torch.tensor([[-2.0, -6.0]]), reference_P2=torch.zeros(1, 2),
    ...              counts_P2=torch.tensor([[4, 6]]), nll_P2=torch.zeros(1, 2))
    >>> round(simpo(pair, PreferenceLoss(loss="simpo", beta=2.0, simpo_gamma=1.0)).item(), 4)
    0.6931
    """
    per_token_P2 = pairs.logps_P2 / pairs.lengths_P2
    return smoothed_loss(
        settings.beta * (per_token_P2[:, 0] - per_token_P2[:, 1]) - settings.simpo_gamma, settings.label_smoothing
    )


def orpo(pairs: PairLogps, settings: PreferenceLoss) -> torch.Tensor:
    """Odds-ratio term of ORPO (Hong et al., 2024, eq. 7), weighted by beta: -beta * log sigmoid(log odds of the chosen
    completion - log odds of the rejected one), with probabilities per token.

    >>> pair = PairLogps(logps_P2=torch.tensor([[-1.0, -1.0]]), reference_P2=torch.zeros(1, 2),
    ...              counts_P2=torch.tensor([[1, 1]]), nll_P2=torch.zeros(1, 2))
    >>> round(orpo(pair, PreferenceLoss(loss="orpo", beta=1.0)).item(), 4)
    0.6931
    """
    # A completion of probability 1 in float32 would have infinite odds and no gradient.
    per_token_P2 = (pairs.logps_P2 / pairs.lengths_P2).clamp(max=-torch.finfo(torch.float32).eps)
    odds_P2 = per_token_P2 - log_one_minus_exp(per_token_P2)
    return -settings.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


def log_one_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation.

    >>> log_one_minus_exp(torch.tensor([-1e-4, -50.0])).tolist()
    [-9.210390090942383, -1.9287498933537385e-22]
    """
    return torch.where(x < LOG_HALF, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))
