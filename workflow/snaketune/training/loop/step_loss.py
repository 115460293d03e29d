"""The loss of an optimizer step: chosen losses with their weights, each averaged over what it is averaged over.

Most losses are sums over pairs, so a micro-batch adds its share and needs to know no more than how many there are in the step.
The others are functions of all of its pairs. For these the step's log-probabilities are computed first, without gradients;
then the loss and its derivative by each of them; and then the micro-batches again, each with its derivatives as weights
(GradCache, Gao et al., 2021). So a step is the same however it falls into micro-batches and processes.

Shapes: P pairs, F = 4 features of a pair: log-probabilities of chosen and rejected, likelihood terms.
"""

from dataclasses import replace

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference import dpo_loss, unpaired_loss, unreferenced_loss
from snaketune.training.preference.dpo_loss import PairLoss, Pairs

PER_PAIR: dict[str, PairLoss] = {
    "sigmoid": dpo_loss.sigmoid,
    "ipo": dpo_loss.ipo,
    "hinge": dpo_loss.hinge,
    "robust": dpo_loss.robust,
    "exo_pair": dpo_loss.exo_pair,
    "nca_pair": dpo_loss.nca_pair,
    "bco_pair": dpo_loss.bco_pair,
    "sppo_hard": dpo_loss.sppo_hard,
    "apo_zero": dpo_loss.apo_zero,
    "apo_down": dpo_loss.apo_down,
    "discopop": dpo_loss.discopop,
    "sigmoid_norm": dpo_loss.sigmoid_norm,
    "aot": dpo_loss.aot,
    "simpo": unreferenced_loss.simpo,
    "orpo": unreferenced_loss.orpo,
    "cpo": unreferenced_loss.cpo,
    "kto": unpaired_loss.kto,
    "apo_zero_unpaired": unpaired_loss.apo_zero_unpaired,
}
# Of these, what a pair adds depends on all others of the step.
OF_WHOLE_STEPS = {"aot", "kto"}
# Losses whose likelihood term is over the prompt too.
WITH_PROMPTS = {"orpo"}
# What `totals` count: pairs, tokens of chosen completions, tokens of these with their prompts.
COUNTED = 3


def needs_whole_step(told: PreferenceLoss) -> bool:
    """Whether what a micro-batch adds depends on the rest of its step."""
    return not OF_WHOLE_STEPS.isdisjoint(told.weights)


def needs_prompts(told: PreferenceLoss) -> bool:
    """Whether a prompt's tokens are learned with the completion."""
    return not WITH_PROMPTS.isdisjoint(told.weights)


def loss_of(pairs: Pairs, told: PreferenceLoss, totals: torch.Tensor) -> torch.Tensor:
    """What pairs add to the loss of their step.

    Args:
        pairs: some of a step, or all of it where `needs_whole_step`.
        totals: int64[COUNTED] of the whole step.
    Returns:
        float32 scalar.

    >>> pair = Pairs(logps_P2=torch.tensor([[-2.0, -2.0]]), reference_P2=torch.zeros(1, 2), counts_P2=torch.tensor([[4, 4]]),
    ...              nll_P2=torch.tensor([[2.0, 0.0]]))
    >>> told = PreferenceLoss(loss={"sigmoid": 1.0, "sft": 0.5})
    >>> round(loss_of(pair, told, torch.tensor([2, 4, 0])).item(), 4)    # log 2 / 2 + 0.5 * 2 / 4
    0.5966
    """
    over_pairs, over_tokens = totals.clamp(min=1)[0], totals.clamp(min=1)[1:]
    weights = told.weights
    loss = pairs.logps_P2.new_zeros(())
    for name, weight in weights.items():
        if name in PER_PAIR:
            loss = loss + weight * PER_PAIR[name](pairs, told).sum() / over_pairs
    chosen, with_prompt = (pairs.nll_P2.sum(0) / over_tokens).unbind()
    likelihood = weights.get("sft", 0.0) + weights.get("cpo", 0.0) * told.cpo_alpha
    if likelihood:
        loss = loss + likelihood * chosen
    if needs_prompts(told):
        loss = loss + weights["orpo"] * with_prompt
    return loss


def derivatives(pairs: Pairs, told: PreferenceLoss, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a whole step: its loss, and the derivative by each feature, float32[P, F].

    >>> pair = Pairs(logps_P2=torch.tensor([[0.0, 0.0]]), reference_P2=torch.zeros(1, 2), counts_P2=torch.tensor([[4, 4]]),
    ...              nll_P2=torch.zeros(1, 2))
    >>> loss, derivative_PF = derivatives(pair, PreferenceLoss(loss="aot", beta=1.0), torch.tensor([1, 4, 0]))
    >>> round(loss.item(), 4), derivative_PF.tolist()
    (0.6931, [[-0.5, 0.5, 0.0, 0.0]])
    """
    with torch.enable_grad():
        features_PF = features(pairs).detach().requires_grad_()
        loss = loss_of(replace(pairs, logps_P2=features_PF[:, :2], nll_P2=features_PF[:, 2:]), told, totals)
        (derivative_PF,) = torch.autograd.grad(loss, features_PF)
    return loss.detach(), derivative_PF


def features(pairs: Pairs) -> torch.Tensor:
    """What of pairs depends on the policy, float32[P, F]."""
    return torch.cat([pairs.logps_P2, pairs.nll_P2], dim=1)
