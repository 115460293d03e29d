"""How often, and by how much, a model prefers the chosen completion: over all pairs, and of each."""

from typing import Any

import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.evaluation.pairs import pair_table
from snaketune.models.devices import Compute
from snaketune.models.logprobs import pair_logprobs_of
from snaketune.packing.reader import PackedRows, documents
from snaketune.training.reference import Reference, is_comparable, read_ref_logps


def comparable_references(ref_logps: list[Artifact], compute: Compute) -> dict[str, Reference]:
    """By pair id, the held-out references that were computed as this model is."""
    return {
        pair: reference
        for artifact in ref_logps
        if is_comparable(artifact, compute)
        for pair, reference in read_ref_logps(artifact, "held_out").items()
    }


def held_out_preferences(
    model: torch.nn.Module,
    rows: PackedRows,
    pack: Artifact,
    compute: Compute,
    name: str,
    references: dict[str, Reference],
) -> tuple[dict[str, Any], pa.Table]:
    """Scores of the held-out rows of one pack, and its pairs one by one (PAIRS, in the order of the rows)."""
    sums_P2, counts_P2 = pair_logprobs_of(model, rows, compute, f"preferences, {name}")
    ids = [document["id"] for document in documents(pack, "held_out")]
    scores = preference_scores(ids, sums_P2, counts_P2, references)
    known = {pair: (reference.chosen_logp, reference.rejected_logp) for pair, reference in references.items()}
    return scores, pair_table(name, ids, sums_P2.tolist(), counts_P2.tolist(), known)


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
        `reward_margin_nats`: the same for its log-ratio to the reference (DPO's implicit reward, not scaled by beta);
        log-probabilities and rewards of either completion, means over the pairs. Their names stand in `config/measured.py`.
    """
    chosen_P, rejected_P = sums_P2[:, 0], sums_P2[:, 1]
    per_token_P2 = sums_P2 / counts_P2.clamp(min=1)
    scores: dict[str, Any] = {
        "pairs": len(ids),
        "logp_accuracy": _mean(chosen_P > rejected_P),
        "logp_accuracy_per_token": _mean(per_token_P2[:, 0] > per_token_P2[:, 1]),
        "logp_margin_nats": _mean(chosen_P - rejected_P),
        "chosen_logp_nats": _mean(chosen_P),
        "rejected_logp_nats": _mean(rejected_P),
        "reward_accuracy": None,
        "reward_margin_nats": None,
        "chosen_reward_nats": None,
        "rejected_reward_nats": None,
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
            "chosen_reward_nats": _mean(ratio_K2[:, 0]),
            "rejected_reward_nats": _mean(ratio_K2[:, 1]),
            "pairs_with_reference": len(known),
        }
    return scores


def _mean(values: torch.Tensor) -> float | None:
    return round(values.double().mean().item(), 4) if len(values) else None
