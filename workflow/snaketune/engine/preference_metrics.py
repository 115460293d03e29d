"""Metrics of a preference training: sums over the pairs of every optimizer step and all processes, and their means.

    accuracy                            share of pairs whose chosen completion has the higher reward; equal ones count half
    margin                              mean reward of the chosen completion minus that of the rejected one
    chosen_reward, rejected_reward      beta * log-ratio to the reference; without one, beta * log-probability, per token if
                                        the loss uses probabilities per token (simpo, orpo)
    chosen_logp, rejected_logp          log-probability under the policy, in nats per completion, weighted by `ld_alpha` if set
    chosen_logp_per_token, …            the same in nats per token, over the tokens of all those completions
    chosen_tokens, rejected_tokens      mean lengths
    kl                                  log ref - log pi, mean over all completions: the KL divergence of the reference from
                                        the policy as far as they are samples of the reference; for KTO, the reference point
    length_correlation                  correlation of the margin with the difference of the two lengths
    sources.0/accuracy, …               each metric per source, numbered as in the config, if a corpus has several

Of single completions, "chosen" are the desirable and "rejected" the undesirable ones, and there is no accuracy.
"""

import torch

from snaketune.engine.pair_logps import PairLogps
from snaketune.engine.pair_metrics import Sums, in_double, sums_by_source
from snaketune.engine.preference_settings import PreferenceSettings

# Losses that use log-probabilities per token.
PER_TOKEN = {"simpo", "orpo"}
SUMS = (
    "pairs", "chosen", "rejected", "right", "margin", "margin_squared", "chosen_reward", "chosen_reward_squared",
    "rejected_reward", "chosen_logp", "rejected_logp", "chosen_tokens", "rejected_tokens", "longer", "difference",
    "difference_squared", "margin_by_difference", "kl",
)  # fmt: skip


@torch.no_grad()
def batch_sums(pairs: PairLogps, settings: PreferenceSettings, source_P: torch.Tensor, sources: int) -> torch.Tensor:
    """Sums over the pairs of a batch, per source: float[sources, SUMS], float64 except on MPS, which lacks it.

    >>> pair = PairLogps(logps_P2=torch.tensor([[-2.0, -6.0]]), reference_P2=torch.tensor([[-3.0, -4.0]]),
    ...              counts_P2=torch.tensor([[4, 6]]), nll_P2=torch.zeros(1, 2))
    >>> (row,) = batch_sums(pair, PreferenceSettings(beta=0.5), torch.tensor([0]), sources=1).tolist()
    >>> sums = dict(zip(SUMS, row))
    >>> sums["margin"], sums["kl"], sums["difference"], sums["longer"]
    (1.5, 0.5, -2.0, 0.0)
    """
    per_token = PER_TOKEN & settings.weights.keys()
    unreferenced_P2 = pairs.logps_P2 / pairs.lengths_P2 if per_token else pairs.logps_P2
    reward_P2 = in_double(settings.beta * (pairs.ratios_P2 if settings.needs_reference else unreferenced_P2))
    logps_P2, counts_P2, ratio_P2 = map(in_double, (pairs.logps_P2, pairs.counts_P2, pairs.ratios_P2))
    ones_P = torch.ones_like(reward_P2[:, 0])
    if pairs.desirable_P is None:
        chosen_P = rejected_P = ones_P
        margin_P, difference_P = reward_P2[:, 0] - reward_P2[:, 1], counts_P2[:, 0] - counts_P2[:, 1]
        kl_P = -ratio_P2.mean(1) if settings.needs_reference else 0 * ones_P
    else:
        # Both columns are the row's own completion; the mismatched one counts only in `kl`.
        chosen_P = in_double(pairs.desirable_P)
        rejected_P = 1 - chosen_P
        reward_P2, logps_P2, counts_P2 = (values[:, [0, 0]] for values in (reward_P2, logps_P2, counts_P2))
        margin_P = difference_P = 0 * ones_P
        kl_P = ratio_P2[:, 1]
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
    return sums_by_source(torch.stack([in_double(columns[name]) for name in SUMS], dim=1), source_P, sources)


def means(sums: Sums, settings: PreferenceSettings) -> dict[str, float]:
    """Compute metrics from sums over pairs; metrics that aren't defined for these pairs are omitted.

    >>> two = {"pairs": 2, "chosen": 2, "right": 1, "margin": 3.0, "chosen_logp": -8.0, "chosen_tokens": 16, "kl": 1.0}
    >>> metrics = means(dict.fromkeys(SUMS, 0.0) | two, PreferenceSettings())
    >>> [metrics[name] for name in ("accuracy", "margin", "chosen_logp_per_token", "chosen_tokens", "kl")]
    [0.5, 1.5, -0.5, 8.0, 0.5]
    """
    if not sums["pairs"]:
        return {}
    metrics: dict[str, float] = {}
    sides = [side for side in ("chosen", "rejected") if sums[side]]
    for side in sides:
        metrics |= {f"{side}_{name}": sums[f"{side}_{name}"] / sums[side] for name in ("reward", "logp", "tokens")}
        metrics[f"{side}_logp_per_token"] = sums[f"{side}_logp"] / max(sums[f"{side}_tokens"], 1)
    kl = sums["kl"] / sums["pairs"]
    if settings.unpaired:
        if len(sides) == 2:
            metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        metrics["kl"] = max(kl, 0.0)
    else:
        metrics |= {"accuracy": sums["right"] / sums["pairs"], "margin": sums["margin"] / sums["pairs"]}
        if (correlation := length_correlation(sums)) is not None:
            metrics["length_correlation"] = correlation
        if settings.needs_reference:
            metrics["kl"] = kl
    return {name: round(value, 6) for name, value in metrics.items()}


def length_correlation(sums: Sums) -> float | None:
    """Pearson correlation of the margin with chosen minus rejected tokens; None if either is the same for all pairs.

    >>> three = {"pairs": 3, "margin": 3.0, "margin_squared": 5.0, "difference": 6.0, "difference_squared": 20.0,
    ...          "margin_by_difference": 10.0}
    >>> round(length_correlation(three), 6)
    1.0
    """
    pairs = sums["pairs"]
    margin, difference = sums["margin"] / pairs, sums["difference"] / pairs
    margin_variance = sums["margin_squared"] / pairs - margin**2
    difference_variance = sums["difference_squared"] / pairs - difference**2
    # Identical values leave a variance of rounding errors.
    if margin_variance <= 1e-12 * sums["margin_squared"] or difference_variance <= 1e-12 * sums["difference_squared"]:
        return None
    return (sums["margin_by_difference"] / pairs - margin * difference) / (margin_variance * difference_variance) ** 0.5
