"""Preference accuracy and margins: how often, and by how much, a model prefers the chosen completion."""

import math
from typing import Any

import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import all_pair_logprobs
from snaketune.engine.packing.rows import PackedRows
from snaketune.evaluation.score_intervals import mean_interval, share_interval
from snaketune.packing.reader import documents
from snaketune.training.reference.logps_table import Reference, is_comparable, read_ref_logps

# `pairs.arrow`. source: index of the pair's source in the corpus, from 0. logp: summed log-probabilities in nats, over so many
# tokens. The reference's are null where there is none, or none that can be compared.
_LOGPS, _COUNTS = pa.float64(), pa.int32()
PAIRS = pa.schema(
    {
        "corpus": pa.string(),
        "id": pa.string(),
        "source": pa.int16(),
        "chosen_logp": _LOGPS,
        "rejected_logp": _LOGPS,
        "chosen_tokens": _COUNTS,
        "rejected_tokens": _COUNTS,
        "reference_chosen_logp": _LOGPS,
        "reference_rejected_logp": _LOGPS,
    }
)


def comparable_references(ref_logps: list[Artifact], compute: Compute) -> dict[str, Reference]:
    """Return held-out reference log-probabilities by pair id, where they were computed as `compute` does."""
    references: dict[str, Reference] = {}
    for artifact in ref_logps:
        if is_comparable(artifact, compute):
            references |= read_ref_logps(artifact, "held_out")
    return references


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
    reference_P2 = reference_logps(ids, counts_P2, references)
    scores = preference_scores(sums_P2, counts_P2, reference_P2) | by_source(sources, sums_P2, counts_P2, reference_P2)
    return scores, pair_table(name, ids, sources, sums_P2, counts_P2, reference_P2)


def pair_table(
    corpus: str,
    ids: list[str],
    sources: list[int],
    sums_P2: torch.Tensor,
    counts_P2: torch.Tensor,
    reference_P2: torch.Tensor,
) -> pa.Table:
    """Return the pairs of one corpus as a table with the schema PAIRS."""
    known_P2 = [[None if math.isnan(logp) else logp for logp in logps] for logps in reference_P2.tolist()]
    rows = [
        (corpus, pair, source, *sums, *counts, *logps)
        for pair, source, sums, counts, logps in zip(
            ids, sources, sums_P2.tolist(), counts_P2.tolist(), known_P2, strict=True
        )
    ]
    return pa.Table.from_pylist([dict(zip(PAIRS.names, row)) for row in rows], schema=PAIRS)


def reference_logps(ids: list[str], counts_P2: torch.Tensor, references: dict[str, Reference]) -> torch.Tensor:
    """Return reference log-probabilities, float64[P, 2], NaN where there are none over exactly the evaluated tokens; print
    how many there are over others: training may truncate a pair elsewhere than the evaluation, and log-probabilities of
    different tokens give no reward."""
    logps, mismatched = [], 0
    for pair, counts in zip(ids, counts_P2.tolist(), strict=True):
        reference = references.get(pair)
        same = reference is not None and list(reference.tokens) == counts
        logps.append(reference.logps if same else (math.nan, math.nan))
        mismatched += reference is not None and not same
    if mismatched:
        print(f"{mismatched} pairs were truncated differently for the reference; they get no reward", flush=True)
    return torch.tensor(logps, dtype=torch.float64).reshape(-1, 2)


def by_source(
    sources: list[int], sums_P2: torch.Tensor, counts_P2: torch.Tensor, reference_P2: torch.Tensor
) -> dict[str, Any]:
    """Return `{"by_source": ...}`, the `preference_scores` by index of the source; empty if there is only one source."""
    scores = {}
    for number in sorted(set(sources)):
        own = [index for index, source in enumerate(sources) if source == number]
        scores[str(number)] = preference_scores(sums_P2[own], counts_P2[own], reference_P2[own])
    return {"by_source": scores} if len(scores) > 1 else {}


def preference_scores(sums_P2: torch.Tensor, counts_P2: torch.Tensor, reference_P2: torch.Tensor) -> dict[str, Any]:
    """Return accuracies and margins of held-out pairs, from log-probabilities, token counts and `reference_logps`.

    `logp_accuracy`: share of pairs whose chosen completion has the higher log-probability; `reward_accuracy` and
    `reward_margin_nats`: the same for the log-ratio to the reference (DPO's implicit reward, not scaled by beta);
    log-probabilities and rewards of both completions, means over the pairs. A tie counts half in an accuracy. The names are
    listed in `config/score_names.py`; each has a 95% interval (`NAME_interval`).
    """
    chosen_P, rejected_P = sums_P2.unbind(1)
    per_token_P2 = sums_P2 / counts_P2.clamp(min=1)
    ratio_K2 = (sums_P2 - reference_P2)[~reference_P2[:, 0].isnan()]
    margin_K = ratio_K2[:, 0] - ratio_K2[:, 1]
    return {
        "pairs": len(sums_P2),
        **_mean("logp_margin_nats", chosen_P - rejected_P),
        **_mean("chosen_logp_nats", chosen_P),
        **_mean("rejected_logp_nats", rejected_P),
        **_share_won("logp_accuracy", chosen_P - rejected_P),
        **_share_won("logp_accuracy_per_token", per_token_P2[:, 0] - per_token_P2[:, 1]),
        "pairs_with_reference": len(ratio_K2),
        **_mean("reward_margin_nats", margin_K),
        **_mean("chosen_reward_nats", ratio_K2[:, 0]),
        **_mean("rejected_reward_nats", ratio_K2[:, 1]),
        **_share_won("reward_accuracy", margin_K),
    }


def _mean(name: str, values_P: torch.Tensor) -> dict[str, Any]:
    """Return the mean, None without pairs, and its 95% interval."""
    mean = round(values_P.double().mean().item(), 4) if len(values_P) else None
    return {name: mean, f"{name}_interval": mean_interval(values_P.tolist())}


def _share_won(name: str, margins_P: torch.Tensor) -> dict[str, Any]:
    """Return the share of margins above zero, zeros counting half, None without pairs, and Wilson's interval."""
    share = ((1 + margins_P.sign()) / 2).double().mean().item() if len(margins_P) else None
    interval = share_interval(share, len(margins_P))
    return {name: None if share is None else round(share, 4), f"{name}_interval": interval}
