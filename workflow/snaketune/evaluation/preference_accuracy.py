"""How often, and by how much, a model prefers the chosen completion: over all pairs, and of each."""

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
    sums_P2, counts_P2 = all_pair_logprobs(model, rows, compute, f"preferences, {name}")
    held_out = list(documents(pack, "held_out"))
    ids, sources = ([document[what] for document in held_out] for what in ("id", "source"))
    references = with_same_tokens(ids, counts_P2, references)
    scores = preference_scores(ids, sums_P2, counts_P2, references)
    scores |= by_source(ids, sources, sums_P2, counts_P2, references)
    known = {pair: (reference.chosen_logp, reference.rejected_logp) for pair, reference in references.items()}
    return scores, pair_table(name, ids, sources, sums_P2.tolist(), counts_P2.tolist(), known)


def with_same_tokens(ids: list[str], counts_P2: torch.Tensor, references: dict[str, Reference]) -> dict[str, Reference]:
    """The references over the very tokens that are evaluated, by pair id; says how many aren't. Training may have truncated a
    pair elsewhere than the evaluation does, and a whole answer less half of it is no reward.

    Args:
        ids, counts_P2: of the pairs, as in `preference_scores`.
    """
    counts = dict(zip(ids, map(tuple, counts_P2.tolist())))
    same = {
        pair: reference
        for pair, reference in references.items()
        if counts.get(pair) == (reference.chosen_tokens, reference.rejected_tokens)
    }
    if other := len((references.keys() & counts.keys()) - same.keys()):
        print(f"{other} pairs were truncated otherwise for the reference; they have no reward", flush=True)
    return same


def by_source(
    ids: list[str], sources: list[int], sums_P2: torch.Tensor, counts_P2: torch.Tensor, references: dict[str, Reference]
) -> dict[str, Any]:
    """`by_source`: `preference_scores` of the pairs of each source, by its number; nothing where there is one source."""
    numbers = sorted(set(sources))
    if len(numbers) < 2:
        return {}
    places = {number: [place for place, source in enumerate(sources) if source == number] for number in numbers}
    return {
        "by_source": {
            str(number): preference_scores([ids[place] for place in own], sums_P2[own], counts_P2[own], references)
            for number, own in places.items()
        }
    }


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
        log-probabilities and rewards of either completion, means over the pairs. A pair that neither completion wins counts
        half in an accuracy. Their names stand in `config/score_names.py`;
        each has a 95% interval beside it (`NAME_interval`).
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
    """Means with their 95% intervals (`NAME_interval`), from the standard error; None where there is nothing.

    Args:
        won: margins, of which the share above zero is taken, and half of those that are zero; with Wilson's interval.
    """
    found: dict[str, Any] = {}
    for name, values_P in (values | won).items():
        if name in won:
            values_P = (1 + values_P.sign()) / 2
        mean = values_P.double().mean().item() if len(values_P) else None
        found[name] = None if mean is None else round(mean, 4)
        found[f"{name}_interval"] = (
            share_interval(mean, len(values_P)) if name in won else mean_interval(values_P.tolist())
        )
    return found
