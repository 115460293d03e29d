"""Preference accuracy and margins: how often, and by how much, a model prefers the chosen completion."""

from typing import Any

import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.evaluation.pair_logps import pair_table
from snaketune.evaluation.score_intervals import mean_interval, share_interval
from snaketune.models.devices import Compute
from snaketune.models.logprobs import all_pair_logprobs
from snaketune.packing.reader import PackedRows, documents
from snaketune.training.reference.logps_table import Reference, is_comparable, read_ref_logps


def comparable_references(ref_logps: list[Artifact], compute: Compute) -> dict[str, Reference]:
    """Return held-out reference log-probabilities by pair id, where they were computed as `compute` does."""
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
    """Return scores of the held-out rows of one pack, and a table of its pairs (PAIRS, in the order of the rows)."""
    sums_P2, counts_P2 = all_pair_logprobs(model, rows, compute, f"preferences, {name}")
    held_out = list(documents(pack, "held_out"))
    ids, sources = ([document[what] for document in held_out] for what in ("id", "source"))
    references = with_same_tokens(ids, counts_P2, references)
    scores = preference_scores(ids, sums_P2, counts_P2, references)
    scores |= by_source(ids, sources, sums_P2, counts_P2, references)
    known = {pair: (reference.chosen_logp, reference.rejected_logp) for pair, reference in references.items()}
    return scores, pair_table(name, ids, sources, sums_P2.tolist(), counts_P2.tolist(), known)


def with_same_tokens(ids: list[str], counts_P2: torch.Tensor, references: dict[str, Reference]) -> dict[str, Reference]:
    """Return the references over exactly the evaluated tokens, by pair id; print how many others there are.

    Training may truncate a pair elsewhere than the evaluation; log-probabilities of different tokens give no reward.

    Args:
        ids, counts_P2: as in `preference_scores`.
    """
    counts = dict(zip(ids, map(tuple, counts_P2.tolist())))
    same = {
        pair: reference
        for pair, reference in references.items()
        if counts.get(pair) == (reference.chosen_tokens, reference.rejected_tokens)
    }
    if mismatched := len((references.keys() & counts.keys()) - same.keys()):
        print(f"{mismatched} pairs were truncated differently for the reference; they get no reward", flush=True)
    return same


def by_source(
    ids: list[str], sources: list[int], sums_P2: torch.Tensor, counts_P2: torch.Tensor, references: dict[str, Reference]
) -> dict[str, Any]:
    """Return `{"by_source": ...}`, the `preference_scores` by index of the source; empty if there is only one source."""
    numbers = sorted(set(sources))
    if len(numbers) < 2:
        return {}
    indices = {number: [index for index, source in enumerate(sources) if source == number] for number in numbers}
    return {
        "by_source": {
            str(number): preference_scores([ids[index] for index in own], sums_P2[own], counts_P2[own], references)
            for number, own in indices.items()
        }
    }


def preference_scores(
    ids: list[str], sums_P2: torch.Tensor, counts_P2: torch.Tensor, references: dict[str, Reference]
) -> dict[str, Any]:
    """Return accuracies and margins of held-out pairs.

    Args:
        ids: pair ids, in the order of the rows.
        sums_P2, counts_P2: log-probabilities and token counts, chosen first.
        references: reference log-probabilities by pair id; empty for a model without a reference.
    Returns:
        `logp_accuracy`: share of pairs whose chosen completion has the higher log-probability; `reward_accuracy` and
        `reward_margin_nats`: the same for the log-ratio to the reference (DPO's implicit reward, not scaled by beta);
        log-probabilities and rewards of both completions, means over the pairs. A tie counts half in an accuracy. The names
        are listed in `config/score_names.py`; each has a 95% interval (`NAME_interval`).
    """
    chosen_P, rejected_P = sums_P2[:, 0], sums_P2[:, 1]
    per_token_P2 = sums_P2 / counts_P2.clamp(min=1)
    scores: dict[str, Any] = {"pairs": len(ids)}
    scores |= _figures(
        {
            "logp_margin_nats": chosen_P - rejected_P,
            "chosen_logp_nats": chosen_P,
            "rejected_logp_nats": rejected_P,
        },
        won={
            "logp_accuracy": chosen_P - rejected_P,
            "logp_accuracy_per_token": per_token_P2[:, 0] - per_token_P2[:, 1],
        },
    )
    known = [i for i, pair in enumerate(ids) if pair in references]
    reference_K2 = torch.tensor(
        [(references[ids[i]].chosen_logp, references[ids[i]].rejected_logp) for i in known], dtype=sums_P2.dtype
    ).reshape(-1, 2)
    ratio_K2 = sums_P2[known] - reference_K2
    margin_K = ratio_K2[:, 0] - ratio_K2[:, 1]
    return (
        scores
        | {"pairs_with_reference": len(known)}
        | _figures(
            {
                "reward_margin_nats": margin_K,
                "chosen_reward_nats": ratio_K2[:, 0],
                "rejected_reward_nats": ratio_K2[:, 1],
            },
            won={"reward_accuracy": margin_K},
        )
    )


def _figures(values: dict[str, torch.Tensor], won: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return means with 95% intervals (`NAME_interval`) from the standard error; None without pairs.

    Args:
        values: values whose mean is taken.
        won: margins whose share above zero is taken, zeros counting half; with Wilson's interval.
    """
    scores: dict[str, Any] = {}
    for name, values_P in (values | won).items():
        if name in won:
            values_P = (1 + values_P.sign()) / 2
        mean = values_P.double().mean().item() if len(values_P) else None
        scores[name] = None if mean is None else round(mean, 4)
        scores[f"{name}_interval"] = (
            share_interval(mean, len(values_P)) if name in won else mean_interval(values_P.tolist())
        )
    return scores
