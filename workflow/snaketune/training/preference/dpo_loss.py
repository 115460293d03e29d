"""The losses of preference optimization, each a function of what a model says of pairs; one value per pair.

With pi = policy and ref = reference, each log-probability summed over a completion's tokens:

    chosen   = log pi(chosen)   - log ref(chosen)              the log-ratios
    rejected = log pi(rejected) - log ref(rejected)
    margin   = beta * (score(chosen) - score(rejected))        score is the identity, for the reverse KL

Names, and what stands in a formula where a paper leaves it open, are TRL's. Losses of single completions are in
`unpaired_loss`, those of the policy's own probabilities in `unreferenced_loss`, and `step_loss` puts them together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from snaketune.config.losses import PreferenceLoss

# exp() of more than this isn't a number that float32 holds.
LARGEST_EXPONENT = 80.0


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What is known of P pairs; of unpaired rows, the second completion is another row's after the same prompt.

    Attributes:
        logps_P2: float32, log-probabilities of the policy, chosen first; weighted where there is an `ld_alpha`.
        reference_P2: float32, the reference's; zeros for losses that have none.
        counts_P2: int64, tokens.
        nll_P2: float32, negative log-likelihood of the chosen completion, and of it with its prompt (zeros where no loss
            asks for prompts).
        desirable_P: bool, of unpaired rows.
    """

    logps_P2: torch.Tensor
    reference_P2: torch.Tensor
    counts_P2: torch.Tensor
    nll_P2: torch.Tensor
    desirable_P: torch.Tensor | None = None

    @property
    def ratios_P2(self) -> torch.Tensor:
        return self.logps_P2 - self.reference_P2

    @property
    def lengths_P2(self) -> torch.Tensor:
        """Tokens, to divide by."""
        return self.counts_P2.clamp(min=1)


PairLoss = Callable[[Pairs, PreferenceLoss], torch.Tensor]


def scores(ratios: torch.Tensor, told: PreferenceLoss) -> torch.Tensor:
    """f'(pi / ref) by log-ratio, which takes the place of the log-ratio where another divergence than the reverse KL holds the
    policy to its reference (f-DPO, Wang et al., 2023, table 1), up to constants that a difference doesn't see.

    >>> told = PreferenceLoss(f_divergence_type="forward_kl")
    >>> [round(score, 4) for score in scores(torch.tensor([0.0, 1.0]), told).tolist()]
    [0.0, 0.6321]
    """
    match told.f_divergence_type:
        case "forward_kl":
            return -torch.expm1((-ratios).clamp(max=LARGEST_EXPONENT))
        case "js_divergence":
            return math.log(2) + F.logsigmoid(ratios)
        case "alpha_divergence" if abs(power := told.f_alpha_divergence_coef - 1) >= 1e-6:
            return torch.expm1((power * ratios).clamp(max=LARGEST_EXPONENT)) / power
        case _:
            return ratios


def margins(pairs: Pairs, told: PreferenceLoss, per_token: bool = False) -> torch.Tensor:
    """Difference of the scores of chosen and rejected, float32[P], not yet times beta."""
    scores_P2 = scores(pairs.ratios_P2, told)
    if per_token:
        scores_P2 = scores_P2 / pairs.lengths_P2
    return scores_P2[:, 0] - scores_P2[:, 1]


def smoothed(logits_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Cross entropy where a share of the labels is taken to be wrong ("conservative DPO", Mitchell, 2023)."""
    return -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)


def sigmoid(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """DPO (Rafailov et al., 2023, eq. 7): -log sigmoid(margin); TRL's has no label smoothing, this one may.

    >>> pair = Pairs(logps_P2=torch.tensor([[2.0, -2.0]]), reference_P2=torch.zeros(1, 2), counts_P2=torch.tensor([[4, 4]]),
    ...              nll_P2=torch.zeros(1, 2))
    >>> round(sigmoid(pair, PreferenceLoss(beta=0.5)).item(), 4)
    0.1269
    >>> hinge(pair, PreferenceLoss()).item()
    0.6000000238418579
    >>> ipo(pair, PreferenceLoss(beta=0.25)).item()
    1.0
    """
    return smoothed(told.beta * margins(pairs, told), told.label_smoothing)


def sigmoid_norm(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """The same of log-ratios per token (Tulu 3, Lambert et al., 2024, "length-normalized DPO")."""
    return -F.logsigmoid(told.beta * margins(pairs, told, per_token=True))


def hinge(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """SLiC's max(0, 1 - margin) (Zhao et al., 2023), of log-ratios (Liu et al., 2023, RSO)."""
    return torch.relu(1 - told.beta * margins(pairs, told))


def ipo(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """IPO (Azar et al., 2023, eq. 17): (difference of the log-ratios per token - 1 / (2 beta))^2; per token as its authors
    have it in their code."""
    return (margins(pairs, told, per_token=True) - 1 / (2 * told.beta)) ** 2


def robust(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """rDPO (Chowdhury et al., 2024, eq. 12): unbiased where a share s of the labels is flipped,
    ((1 - s) loss(margin) - s loss(-margin)) / (1 - 2s)."""
    logits_P, flipped = told.beta * margins(pairs, told), told.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(logits_P) + flipped * F.logsigmoid(-logits_P)) / (1 - 2 * flipped)


def exo_pair(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """EXO (Ji et al., 2024, eq. 16): KL of (sigmoid(margin), sigmoid(-margin)) from (1 - s, s)."""
    logits_P, smoothing = told.beta * margins(pairs, told), told.label_smoothing
    won_P = torch.sigmoid(logits_P) * (F.logsigmoid(logits_P) - math.log1p(-smoothing))
    return won_P + torch.sigmoid(-logits_P) * (F.logsigmoid(-logits_P) - math.log(smoothing))


def nca_pair(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """NCA for pairs (Chen et al., 2024, appendix C): rewards against zero, not against each other."""
    rewards_P2 = told.beta * pairs.ratios_P2
    return -F.logsigmoid(rewards_P2[:, 0]) - 0.5 * F.logsigmoid(-rewards_P2).sum(1)


def bco_pair(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """BCO for pairs (Jung et al., 2024): a classifier of good and bad. As in TRL 1.16 rewards are held against zero and not
    against a running mean, so it has no state."""
    rewards_P2 = told.beta * pairs.ratios_P2
    return -F.logsigmoid(rewards_P2[:, 0]) - F.logsigmoid(-rewards_P2[:, 1])


def sppo_hard(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """SPPO (Wu et al., 2024, eq. 4.7) where the chosen completion wins for certain."""
    ratios_P2, target = pairs.ratios_P2, 0.5 / told.beta
    return (ratios_P2[:, 0] - target) ** 2 + (ratios_P2[:, 1] + target) ** 2


def apo_zero(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """APO-zero (D'Oosterlinck et al., 2024, eq. 7): chosen completions up, rejected ones down; where chosen ones are better
    than what the model says."""
    rewards_P2 = told.beta * pairs.ratios_P2
    return 1 - torch.sigmoid(rewards_P2[:, 0]) + torch.sigmoid(rewards_P2[:, 1])


def apo_down(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """APO-down (the same, eq. 8): both down, rejected ones further; where chosen ones are worse than what the model says."""
    rewards_P2 = told.beta * pairs.ratios_P2
    return torch.sigmoid(rewards_P2[:, 0]) + 1 - torch.sigmoid(rewards_P2[:, 0] - rewards_P2[:, 1])


def discopop(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """DiscoPOP (Lu et al., 2024, eq. 5): logistic and exponential loss, mixed by the margin itself."""
    logits_P = told.beta * margins(pairs, told)
    mixed_P = torch.sigmoid(logits_P / told.discopop_tau)
    # exp(-margin) times the mixture, which by themselves would be infinity and zero.
    exponential_P = torch.exp(F.logsigmoid(logits_P / told.discopop_tau) - logits_P)
    return -F.logsigmoid(logits_P) * (1 - mixed_P) + exponential_P


def aot(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """AOT for pairs (Melnyk et al., 2024): the policy's margins are to be larger than the reference's as distributions, so
    both are sorted over all pairs of a step, and compared by rank.

    Returns:
        float32[P], by rank.
    """
    own_P, _ = torch.sort(pairs.logps_P2[:, 0] - pairs.logps_P2[:, 1])
    reference_P, _ = torch.sort(pairs.reference_P2[:, 0] - pairs.reference_P2[:, 1])
    return smoothed(told.beta * (own_P - reference_P), told.label_smoothing)
