"""What a preference training is watched by: sums over the pairs of every optimizer step, over all processes, and their means.

    accuracy                            share of pairs whose chosen completion has the higher reward;
                                        where both have the same, as before the first step, a pair counts half
    margin                              mean reward of the chosen completion less that of the rejected one
    chosen_reward, rejected_reward      beta * log-ratio to the reference; without one, beta * log-probability, per token where
                                        the loss is of probabilities per token (simpo, orpo)
    chosen_logp, rejected_logp          log-probability of the policy, in nats per completion; with `ld_alpha` as it weighs them
    chosen_logp_per_token, …            the same in nats per token of all those completions
    chosen_tokens, rejected_tokens      mean lengths
    kl                                  how far the policy has moved from its reference, in nats per completion
    length_correlation                  of the margin with the difference of the two lengths

`kl` is what the pairs tell for free: the mean of log ref - log pi over chosen and rejected completions, which is the KL
divergence of the reference from the policy as far as the completions are what the reference would say, and below zero where
both completions became likelier. KTO has mismatched completions for it, and `kl` is its reference point. Of single completions
chosen are the desirable and rejected the other ones, and there is no accuracy.

Where a corpus has several sources, the same is told of each of them, as `sources.0/accuracy`, numbered as in the config.

Sums stay on the device until a line of the log, a checkpoint or a threshold asks for them.
"""

from collections.abc import Callable, Sequence

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.training.preference.dpo_loss import Pairs

# Losses of probabilities per token.
PER_TOKEN = {"simpo", "orpo"}
SUMS = (
    "pairs", "chosen", "rejected", "right", "margin", "margin_squared", "chosen_reward", "chosen_reward_squared",
    "rejected_reward", "chosen_logp", "rejected_logp", "chosen_tokens", "rejected_tokens", "longer", "difference",
    "difference_squared", "margin_by_difference", "kl",
)  # fmt: skip
# By name; of one step, or added up over some.
Sums = dict[str, float]


def rewards(pairs: Pairs, told: PreferenceLoss) -> torch.Tensor:
    """float32[P, 2]."""
    if told.needs_reference:
        return told.beta * pairs.ratios_P2
    return told.beta * (pairs.logps_P2 / pairs.lengths_P2 if PER_TOKEN & told.weights.keys() else pairs.logps_P2)


def sums_of(pairs: Pairs, told: PreferenceLoss, source_P: torch.Tensor, sources: int) -> torch.Tensor:
    """Of a batch by source, float[sources, SUMS], in float64 where the device has it.

    Args:
        source_P: int64.

    >>> pair = Pairs(logps_P2=torch.tensor([[-2.0, -6.0]]), reference_P2=torch.tensor([[-3.0, -4.0]]),
    ...              counts_P2=torch.tensor([[4, 6]]), nll_P2=torch.zeros(1, 2))
    >>> (row,) = sums_of(pair, PreferenceLoss(beta=0.5), torch.tensor([0]), sources=1).tolist()
    >>> found = dict(zip(SUMS, row))
    >>> found["margin"], found["kl"], found["difference"], found["longer"]
    (1.5, 0.5, -2.0, 0.0)
    """
    with torch.no_grad():
        double = torch.float32 if pairs.logps_P2.device.type == "mps" else torch.float64
        reward_P2, logps_P2, counts_P2 = (
            found.detach().to(double) for found in (rewards(pairs, told), pairs.logps_P2, pairs.counts_P2)
        )
        ones_P = torch.ones_like(reward_P2[:, 0])
        ratio_P2 = pairs.ratios_P2.detach().to(double)
        if pairs.desirable_P is None:
            chosen_P2 = rejected_P2 = torch.stack([ones_P, ones_P], dim=1)
            margin_P, difference_P = reward_P2[:, 0] - reward_P2[:, 1], counts_P2[:, 0] - counts_P2[:, 1]
            kl_P = -ratio_P2.mean(1) if told.needs_reference else 0 * ones_P
        else:
            # Both of the first column, where a row's own completion is.
            good_P = pairs.desirable_P.to(double)
            reward_P2, logps_P2, counts_P2 = (found[:, [0, 0]] for found in (reward_P2, logps_P2, counts_P2))
            chosen_P2 = rejected_P2 = torch.stack([good_P, 1 - good_P], dim=1)
            margin_P = difference_P = 0 * ones_P
            kl_P = ratio_P2[:, 1]
        chosen_P, rejected_P = chosen_P2[:, 0], rejected_P2[:, 1]
        columns = {
            "pairs": ones_P,
            "chosen": chosen_P,
            "rejected": rejected_P,
            "right": (1 + margin_P.sign()) / 2,
            "margin": margin_P,
            "margin_squared": margin_P**2,
            "chosen_reward": chosen_P * reward_P2[:, 0],
            "chosen_reward_squared": chosen_P * reward_P2[:, 0] ** 2,
            "rejected_reward": rejected_P * reward_P2[:, 1],
            "chosen_logp": chosen_P * logps_P2[:, 0],
            "rejected_logp": rejected_P * logps_P2[:, 1],
            "chosen_tokens": chosen_P * counts_P2[:, 0],
            "rejected_tokens": rejected_P * counts_P2[:, 1],
            "longer": difference_P > 0,
            "difference": difference_P,
            "difference_squared": difference_P**2,
            "margin_by_difference": margin_P * difference_P,
            "kl": kl_P,
        }
        columns_PK = torch.stack([columns[name].to(double) for name in SUMS], dim=1)
        # A product adds up in the same order every time, which scattered additions on a GPU don't.
        source_PS = source_P[:, None] == torch.arange(sources, device=source_P.device)
        return source_PS.to(double).T @ columns_PK


def added(steps: Sequence[Sums]) -> Sums:
    """The sums over some steps."""
    return {name: sum(step[name] for step in steps) for name in SUMS}


def by_source(steps: Sequence[Sequence[Sums]], told: PreferenceLoss) -> dict[str, float]:
    """The metrics of each source over some steps; none where there is one source.

    Args:
        steps: for each step, the sums of each source.
    """
    of_sources = list(zip(*steps, strict=True))
    if len(of_sources) < 2:
        return {}
    return {
        f"sources.{number}/{name}": value
        for number, some in enumerate(of_sources)
        for name, value in means(added(some), told).items()
    }


def means(sums: Sums, told: PreferenceLoss) -> dict[str, float]:
    """The metrics of the pairs that the sums are over; those that aren't defined for them are left out.

    >>> two = {"pairs": 2, "chosen": 2, "rejected": 2, "right": 1, "margin": 3.0}
    >>> of_chosen = {"chosen_logp": -8.0, "chosen_tokens": 16, "kl": 1.0}
    >>> sums = dict.fromkeys(SUMS, 0.0) | two | of_chosen
    >>> found = means(sums, PreferenceLoss())
    >>> found["accuracy"], found["margin"], found["chosen_logp_per_token"], found["chosen_tokens"], found["kl"]
    (0.5, 1.5, -0.5, 8.0, 0.5)
    """
    if not sums["pairs"]:
        return {}
    found: dict[str, float] = {}
    for side in ("chosen", "rejected"):
        if not sums[side]:
            continue
        for name in ("reward", "logp", "tokens"):
            found[f"{side}_{name}"] = sums[f"{side}_{name}"] / sums[side]
        found[f"{side}_logp_per_token"] = sums[f"{side}_logp"] / max(sums[f"{side}_tokens"], 1)
    if told.unpaired:
        if "chosen_reward" in found and "rejected_reward" in found:
            found["margin"] = found["chosen_reward"] - found["rejected_reward"]
        found["kl"] = max(sums["kl"] / sums["pairs"], 0.0)
    else:
        found |= {"accuracy": sums["right"] / sums["pairs"], "margin": sums["margin"] / sums["pairs"]}
        if (correlation := length_correlation(sums)) is not None:
            found["length_correlation"] = correlation
        if told.needs_reference:
            found["kl"] = sums["kl"] / sums["pairs"]
    return {name: round(value, 6) for name, value in found.items()}


def length_correlation(sums: Sums) -> float | None:
    """Pearson's, of margin and chosen tokens less rejected tokens; None where either is the same for all pairs.

    >>> three = {"pairs": 3, "margin": 3.0, "margin_squared": 5.0, "difference": 6.0, "difference_squared": 20.0,
    ...          "margin_by_difference": 10.0}
    >>> round(length_correlation(three), 6)
    1.0
    """
    pairs = sums["pairs"]
    margin, difference = sums["margin"] / pairs, sums["difference"] / pairs
    of_margin = sums["margin_squared"] / pairs - margin**2
    of_difference = sums["difference_squared"] / pairs - difference**2
    # What is left of numbers that are all the same.
    if of_margin <= 1e-12 * sums["margin_squared"] or of_difference <= 1e-12 * sums["difference_squared"]:
        return None
    return (sums["margin_by_difference"] / pairs - margin * difference) / (of_margin * of_difference) ** 0.5


class Tally:
    """The sums of every step, in one process until somebody asks."""

    def __init__(self, told: PreferenceLoss, sources: int):
        self.told, self.sources = told, sources
        self.of_step: torch.Tensor | None = None
        self.steps: list[torch.Tensor] = []

    def add(self, pairs: Pairs, source_P: torch.Tensor) -> None:
        """Those of a micro-batch."""
        sums = sums_of(pairs, self.told, source_P, self.sources)
        self.of_step = sums if self.of_step is None else self.of_step + sums

    def end_step(self) -> None:
        self.steps.append(self.of_step)
        self.of_step = None

    def read(self, gather: Callable[[torch.Tensor], torch.Tensor] | None) -> list[list[Sums]]:
        """The steps since it was read last, by source, over all processes; every process reads at once.

        Args:
            gather: takes float[1, n] of each process and gives float[processes, n] of all; None where there is one.
        """
        if not self.steps:
            return []
        sums = torch.stack(self.steps)
        self.steps = []
        if gather is not None:
            sums = gather(sums.reshape(1, -1)).sum(0).reshape(sums.shape)
        return [[dict(zip(SUMS, row)) for row in step] for step in sums.tolist()]
