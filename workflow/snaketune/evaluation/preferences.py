"""How often, and by how much, a model prefers the chosen completion."""

from typing import Any

import torch

from snaketune.training.reference import Reference


def preference_scores(
    ids: list[str], sums_P2: torch.Tensor, counts_P2: torch.Tensor, references: dict[str, Reference]
) -> dict[str, Any]:
    """Accuracy and margins of held-out pairs.

    Args:
        ids: pair ids, in the order of the rows.
        sums_P2, counts_P2: log-probabilities and token counts, chosen first.
        references: the reference's, by id; empty for a model that has none.
    Returns:
        `logp_accuracy`: how often the chosen completion is the likelier one, by itself; `reward_accuracy` and
        `reward_margin_nats`: the same for its log-ratio to the reference (DPO's implicit reward, not scaled by beta).
    """
    chosen_P, rejected_P = sums_P2[:, 0], sums_P2[:, 1]
    per_token_P2 = sums_P2 / counts_P2.clamp(min=1)
    scores: dict[str, Any] = {
        "pairs": len(ids),
        "logp_accuracy": _mean(chosen_P > rejected_P),
        "logp_accuracy_per_token": _mean(per_token_P2[:, 0] > per_token_P2[:, 1]),
        "logp_margin_nats": _mean(chosen_P - rejected_P),
        "reward_accuracy": None,
        "reward_margin_nats": None,
        "pairs_with_reference": 0,
    }
    known = [i for i, pair in enumerate(ids) if pair in references]
    if known:
        reference_K2 = torch.tensor(
            [(references[ids[i]].chosen_logp, references[ids[i]].rejected_logp) for i in known], dtype=sums_P2.dtype
        )
        ratio_K2 = sums_P2[known] - reference_K2
        margin_K = ratio_K2[:, 0] - ratio_K2[:, 1]
        scores |= {
            "reward_accuracy": _mean(margin_K > 0),
            "reward_margin_nats": _mean(margin_K),
            "pairs_with_reference": len(known),
        }
    return scores


def _mean(values: torch.Tensor) -> float | None:
    return round(values.double().mean().item(), 4) if len(values) else None
