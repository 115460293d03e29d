"""The loss of an optimizer step in preference training: a weighted sum of losses, each a mean over pairs or over tokens.

Most losses are sums over pairs: a micro-batch adds its share and needs only the step's number of pairs. The others are
functions of all pairs of the step. For these the step's log-probabilities are computed first, without gradients; then the loss
and its derivative with respect to each of them; then the micro-batches run again, weighted with their derivatives (GradCache,
Gao et al., 2021). So a step is independent of how it is split into micro-batches and processes.

Shapes: P pairs, F = 4 features of a pair (`PairLogps.features_PF`).
"""

from dataclasses import replace

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference.dpo_loss import LOSSES
from snaketune.training.preference.pair_logps import PairLogps

# Losses in which a pair's term depends on all other pairs of the step.
OF_WHOLE_STEPS = {"aot", "kto"}
# Losses whose likelihood term includes the prompt.
WITH_PROMPTS = {"orpo"}


def needs_whole_step(settings: PreferenceLoss) -> bool:
    """Whether the loss of a micro-batch depends on the other pairs of its step."""
    return not OF_WHOLE_STEPS.isdisjoint(settings.weights)


def needs_prompts(settings: PreferenceLoss) -> bool:
    """Whether the likelihood term includes the prompt's tokens."""
    return not WITH_PROMPTS.isdisjoint(settings.weights)


def loss_of(pairs: PairLogps, settings: PreferenceLoss, totals: torch.Tensor) -> torch.Tensor:
    """The share of the step's loss that these pairs contribute, a float32 scalar.

    Args:
        pairs: pairs of one step; all of its pairs if `needs_whole_step`.
        totals: counts over the whole step, int64[3]: pairs, tokens of chosen completions, the same with their prompts.

    >>> pair = PairLogps(logps_P2=torch.tensor([[-2.0, -2.0]]), reference_P2=torch.zeros(1, 2),
    ...              counts_P2=torch.tensor([[4, 4]]), nll_P2=torch.tensor([[2.0, 0.0]]))
    >>> settings = PreferenceLoss(loss={"sigmoid": 1.0, "sft": 0.5})
    >>> round(loss_of(pair, settings, torch.tensor([2, 4, 0])).item(), 4)    # log 2 / 2 + 0.5 * 2 / 4
    0.5966
    """
    over_pairs, over_tokens = totals.clamp(min=1)[0], totals.clamp(min=1)[1:]
    weights = settings.weights
    loss = pairs.logps_P2.new_zeros(())
    for name, weight in weights.items():
        if name in LOSSES:
            loss = loss + weight * LOSSES[name](pairs, settings).sum() / over_pairs
    chosen, with_prompt = (pairs.nll_P2.sum(0) / over_tokens).unbind()
    if likelihood := weights.get("sft", 0.0) + weights.get("cpo", 0.0) * settings.cpo_alpha:
        loss = loss + likelihood * chosen
    if needs_prompts(settings):
        loss = loss + weights["orpo"] * with_prompt
    return loss


def derivatives(pairs: PairLogps, settings: PreferenceLoss, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a whole step, float32 scalar, and its derivative with respect to each feature, float32[P, F]."""
    with torch.enable_grad():
        features_PF = pairs.features_PF.detach().requires_grad_()
        loss = loss_of(replace(pairs, logps_P2=features_PF[:, :2], nll_P2=features_PF[:, 2:]), settings, totals)
        (derivative_PF,) = torch.autograd.grad(loss, features_PF)
    return loss.detach(), derivative_PF
