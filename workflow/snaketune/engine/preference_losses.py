"""Preference losses: functions of the log-probabilities of policy and reference that return one value per pair, float32[P];
and the loss of an optimizer step, a weighted sum of them, each a mean over pairs or over tokens.

With pi = policy and ref = reference, each log-probability summed over a completion's tokens:

    chosen   = log pi(chosen)   - log ref(chosen)              the log-ratios
    rejected = log pi(rejected) - log ref(rejected)
    margin   = beta * (score(chosen) - score(rejected))        for the reverse KL, score is the identity

Names are TRL's, and so is the choice of a formula where a paper leaves it open.

Most losses are sums over pairs: a micro-batch adds its share and needs only the step's number of pairs. The others are
functions of all pairs of the step. For these the step's log-probabilities are computed first, without gradients; then the loss
and its derivative with respect to each of them; then the micro-batches run again, weighted with their derivatives (GradCache,
Gao et al., 2021). So a step is independent of how it is split into micro-batches and processes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from snaketune.engine.pair_logps import PairLogps
from snaketune.engine.preference_settings import PreferenceSettings

# exp() of a larger number overflows float32.
MAX_EXPONENT = 80.0


def scores(ratios: torch.Tensor, settings: PreferenceSettings) -> torch.Tensor:
    """f'(pi / ref) of log-ratios, up to constants that cancel in a difference (f-DPO, Wang et al., 2023, table 1). It replaces
    the log-ratio if the policy is regularized by another divergence than the reverse KL."""
    match settings.f_divergence_type:
        case "forward_kl":
            return -torch.expm1((-ratios).clamp(max=MAX_EXPONENT))
        case "js_divergence":
            return math.log(2) + F.logsigmoid(ratios)
        case "alpha_divergence" if abs(power := settings.f_alpha_divergence_coef - 1) >= 1e-6:
            return torch.expm1((power * ratios).clamp(max=MAX_EXPONENT)) / power
        case _:
            return ratios


def margins(pairs: PairLogps, settings: PreferenceSettings, per_token: bool = False) -> torch.Tensor:
    """Score of the chosen completion minus that of the rejected one, float32[P], not multiplied by beta."""
    scores_P2 = scores(pairs.ratios_P2, settings)
    if per_token:
        scores_P2 = scores_P2 / pairs.lengths_P2
    return scores_P2[:, 0] - scores_P2[:, 1]


def smoothed_loss(logits_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Cross entropy with label smoothing: a share `smoothing` of the labels is assumed to be wrong ("conservative DPO",
    Mitchell, 2023)."""
    return -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)


def sigmoid(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """DPO (Rafailov et al., 2023, eq. 7): -log sigmoid(margin). Unlike TRL's, it supports label smoothing."""
    return smoothed_loss(settings.beta * margins(pairs, settings), settings.label_smoothing)


def sigmoid_norm(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """Length-normalized DPO (Tulu 3, Lambert et al., 2024): -log sigmoid(margin) of log-ratios per token."""
    return -F.logsigmoid(settings.beta * margins(pairs, settings, per_token=True))


def hinge(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """Hinge loss of SLiC (Zhao et al., 2023), max(0, 1 - margin), on log-ratios as in RSO (Liu et al., 2023)."""
    return torch.relu(1 - settings.beta * margins(pairs, settings))


def ipo(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """IPO (Azar et al., 2023, eq. 17): (margin / beta - 1 / (2 beta))^2, with log-ratios per token as in the authors' code."""
    return (margins(pairs, settings, per_token=True) - 1 / (2 * settings.beta)) ** 2


def robust(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """Robust DPO (Chowdhury et al., 2024, eq. 12), unbiased if a share s of the labels is flipped:
    ((1 - s) loss(margin) - s loss(-margin)) / (1 - 2s)."""
    logits_P, flipped = settings.beta * margins(pairs, settings), settings.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(logits_P) + flipped * F.logsigmoid(-logits_P)) / (1 - 2 * flipped)


def exo_pair(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """EXO (Ji et al., 2024, eq. 16): KL divergence of (sigmoid(margin), sigmoid(-margin)) from (1 - smoothing, smoothing)."""
    logits_P, smoothing = settings.beta * margins(pairs, settings), settings.label_smoothing
    won_P = torch.sigmoid(logits_P) * (F.logsigmoid(logits_P) - math.log1p(-smoothing))
    return won_P + torch.sigmoid(-logits_P) * (F.logsigmoid(-logits_P) - math.log(smoothing))


def nca_pair(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """NCA for pairs (Chen et al., 2024, appendix C): compares each reward with zero, not the two with each other."""
    rewards_P2 = settings.beta * pairs.ratios_P2
    return -F.logsigmoid(rewards_P2[:, 0]) - 0.5 * F.logsigmoid(-rewards_P2).sum(1)


def bco_pair(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """BCO for pairs (Jung et al., 2024): classifies completions. As in TRL 1.16, rewards are compared with zero and not with a
    running mean, so the loss has no state."""
    rewards_P2 = settings.beta * pairs.ratios_P2
    return -F.logsigmoid(rewards_P2[:, 0]) - F.logsigmoid(-rewards_P2[:, 1])


def sppo_hard(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """SPPO (Wu et al., 2024, eq. 4.7) with a win probability of 1 for the chosen completion."""
    ratios_P2, target = pairs.ratios_P2, 0.5 / settings.beta
    return (ratios_P2[:, 0] - target) ** 2 + (ratios_P2[:, 1] + target) ** 2


def apo_zero(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """APO-zero (D'Oosterlinck et al., 2024, eq. 7): raises chosen and lowers rejected completions; for chosen completions that
    are better than the model's own."""
    rewards_P2 = settings.beta * pairs.ratios_P2
    return 1 - torch.sigmoid(rewards_P2[:, 0]) + torch.sigmoid(rewards_P2[:, 1])


def apo_down(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """APO-down (D'Oosterlinck et al., 2024, eq. 8): lowers both, rejected completions more; for chosen completions that are
    worse than the model's own."""
    rewards_P2 = settings.beta * pairs.ratios_P2
    return torch.sigmoid(rewards_P2[:, 0]) + 1 - torch.sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1])


def discopop(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """DiscoPOP (Lu et al., 2024, eq. 5): logistic and exponential loss, mixed by a sigmoid of the margin."""
    logits_P = settings.beta * margins(pairs, settings)
    mixed_P = torch.sigmoid(logits_P / settings.discopop_tau)
    # exp(-margin) times the mixture, in log space: the factors alone can be infinity and zero.
    exponential_P = torch.exp(F.logsigmoid(logits_P / settings.discopop_tau) - logits_P)
    return -F.logsigmoid(logits_P) * (1 - mixed_P) + exponential_P


def aot(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """AOT for pairs (Melnyk et al., 2024): compares the distributions of margins of policy and reference. Both are sorted over
    all pairs of a step and compared rank by rank, so there is one value per rank, not per pair."""
    own_P, _ = torch.sort(pairs.logps_P2[:, 0] - pairs.logps_P2[:, 1])
    reference_P, _ = torch.sort(pairs.reference_P2[:, 0] - pairs.reference_P2[:, 1])
    return smoothed_loss(settings.beta * (own_P - reference_P), settings.label_smoothing)


def cpo(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """Preference term of CPO (Xu et al., 2024, eq. 3): the DPO loss with a uniform reference."""
    return smoothed_loss(settings.beta * (pairs.logps_P2[:, 0] - pairs.logps_P2[:, 1]), settings.label_smoothing)


def simpo(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """SimPO (Meng et al., 2024, eq. 6): -log sigmoid(beta * difference of log-probabilities per token - gamma)."""
    per_token_P2 = pairs.logps_P2 / pairs.lengths_P2
    logits_P = settings.beta * (per_token_P2[:, 0] - per_token_P2[:, 1]) - settings.simpo_gamma
    return smoothed_loss(logits_P, settings.label_smoothing)


def orpo(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """Odds-ratio term of ORPO (Hong et al., 2024, eq. 7), weighted by beta: -beta * log sigmoid(log odds of the chosen
    completion - log odds of the rejected one), with probabilities per token."""
    # A completion of probability 1 in float32 would have infinite odds and no gradient.
    per_token_P2 = (pairs.logps_P2 / pairs.lengths_P2).clamp(max=-torch.finfo(torch.float32).eps)
    odds_P2 = per_token_P2 - log_one_minus_exp(per_token_P2)
    return -settings.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])


def log_one_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation (Mächler, 2012).

    >>> log_one_minus_exp(torch.tensor([-1e-4, -50.0])).tolist()
    [-9.210390090942383, -1.9287498933537385e-22]
    """
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def kto(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """KTO (Ethayarajh et al., 2024, eq. 8) of single completions: weight * (1 - sigmoid(beta * (log-ratio - reference point))),
    with the difference negated for undesirable completions.

    The reference point estimates the KL divergence of the policy from its reference (section 4.1): the mean log-ratio of the
    mismatched completions of all rows of a step, at least 0 and without gradient.
    """
    reference_point = pairs.ratios_P2[:, 1].detach().mean().clamp(min=0)
    return _weighted(pairs, settings, pairs.ratios_P2[:, 0] - reference_point)


def apo_zero_unpaired(pairs: PairLogps, settings: PreferenceSettings) -> torch.Tensor:
    """APO-zero of single completions (D'Oosterlinck et al., 2024, eq. 7): KTO with a reference point of 0."""
    return _weighted(pairs, settings, pairs.ratios_P2[:, 0])


def _weighted(pairs: PairLogps, settings: PreferenceSettings, over_P: torch.Tensor) -> torch.Tensor:
    signed_P = torch.where(pairs.desirable_P, over_P, -over_P)
    weight_P = torch.where(pairs.desirable_P, settings.desirable_weight, settings.undesirable_weight)
    return weight_P * (1 - torch.sigmoid(settings.beta * signed_P))


PairLoss = Callable[[PairLogps, PreferenceSettings], torch.Tensor]
LOSSES: dict[str, PairLoss] = {loss.__name__: loss for loss in (
    sigmoid, sigmoid_norm, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop, aot,
    cpo, simpo, orpo, kto, apo_zero_unpaired,
)}  # fmt: skip
# Losses in which a pair's term depends on all other pairs of the step.
OF_WHOLE_STEPS = {"aot", "kto"}
# Losses whose likelihood term includes the prompt.
WITH_PROMPTS = {"orpo"}


def needs_whole_step(settings: PreferenceSettings) -> bool:
    """Whether the loss of a micro-batch depends on the other pairs of its step."""
    return not OF_WHOLE_STEPS.isdisjoint(settings.weights)


def needs_prompts(settings: PreferenceSettings) -> bool:
    """Whether the likelihood term includes the prompt's tokens."""
    return not WITH_PROMPTS.isdisjoint(settings.weights)


def loss_of(pairs: PairLogps, settings: PreferenceSettings, totals: torch.Tensor) -> torch.Tensor:
    """The share of the step's loss that these pairs contribute, a float32 scalar.

    Args:
        pairs: pairs of one step; all of its pairs if `needs_whole_step`.
        totals: counts over the whole step, int64[3]: pairs, tokens of chosen completions, the same with their prompts.

    >>> pair = PairLogps(logps_P2=torch.tensor([[-2.0, -2.0]]), reference_P2=torch.zeros(1, 2),
    ...              counts_P2=torch.tensor([[4, 4]]), nll_P2=torch.tensor([[2.0, 0.0]]))
    >>> settings = PreferenceSettings(weights={"sigmoid": 1.0, "sft": 0.5})
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


def derivatives(
    pairs: PairLogps, settings: PreferenceSettings, totals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a whole step, float32 scalar, and its derivative with respect to each feature, float32[P, F]."""
    with torch.enable_grad():
        features_PF = pairs.features_PF.detach().requires_grad_()
        loss = loss_of(replace(pairs, logps_P2=features_PF[:, :2], nll_P2=features_PF[:, 2:]), settings, totals)
        (derivative_PF,) = torch.autograd.grad(loss, features_PF)
    return loss.detach(), derivative_PF
