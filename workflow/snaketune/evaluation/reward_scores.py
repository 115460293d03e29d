"""Compute the scores of one reward model on held-out pairs: the work of the `eval` stage for `reward:NAME`.

scores.json      accuracy, margin and rewards, in all and by source; accuracy by size of the margin; calibration
rewards.arrow    the rewards of every held-out pair
"""

import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base_models import Pretrained
from snaketune.engine.model.batches import Batch
from snaketune.engine.model.devices import Compute, resolve_compute, use_threads
from snaketune.engine.model.logprobs import over_all_rows
from snaketune.engine.model.parameters import parameter_count
from snaketune.engine.model.reward_head import packed_rewards, with_rewards
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.pair_rewards import collate_pairs
from snaketune.evaluation.held_out import choose_forward
from snaketune.evaluation.pair_scores import accuracy, by_source, mean, wins
from snaketune.files import write_json
from snaketune.models.load_model import load_reward_model
from snaketune.packing.reader import documents, open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec
from snaketune.tables import write_table

REWARDS = pa.schema(
    {
        "corpus": pa.string(),
        "id": pa.string(),
        "source": pa.int16(),
        "chosen_reward": pa.float64(),
        "rejected_reward": pa.float64(),
        "chosen_tokens": pa.int32(),
        "rejected_tokens": pa.int32(),
    }
)
# Groups of pairs by size of the margin, equally many in each; and bins of the probability of the preferred completion.
GROUPS, BINS = 5, 10


def score_reward_model(spec: EvalSpec, work: WorkFolder, *, model: Artifact, packs: list[Artifact]) -> Outcome:
    """Fill `work.payload` with the files above. Args: packs: of `spec.preferences`."""
    started = time.monotonic()
    model.files()
    compute, base = resolve_compute("auto"), Pretrained(path=str(model.folder))
    loaded = with_rewards(load_reward_model(base, compute.weights_dtype(frozen=True))).to(compute.device)
    use_threads(loaded.config, compute)
    held_out = [open_rows(pack, "held_out") for pack in packs]
    compute, about, run = choose_forward(loaded, loaded.config, held_out, compute)
    scores: dict[str, Any] = {}
    tables = [REWARDS.empty_table()]
    for name, rows, pack in zip(spec.preferences, held_out, packs, strict=True):
        if not len(rows):
            continue
        rewards_P2, counts_P2 = all_rewards(loaded, rows, compute, f"preferences, {name}")
        pairs = list(documents(pack, "held_out"))
        sources = np.array([pair["source"] for pair in pairs])
        scores[name] = reward_scores(rewards_P2) | calibration_scores(rewards_P2)
        scores[name] |= by_source(sources, lambda own_P, of=rewards_P2: reward_scores(of[own_P]))
        columns = [[name] * len(pairs), [pair["id"] for pair in pairs], sources, *rewards_P2.T, *counts_P2.T]
        tables.append(pa.Table.from_pydict(dict(zip(REWARDS.names, columns, strict=True)), schema=REWARDS))
    write_json(
        work.payload / "scores.json",
        {"parameters": parameter_count(loaded), "conversations": {}, "preferences": scores},
    )
    write_table(work.payload / "rewards.arrow", pa.concat_tables(tables))
    run |= {"device": str(compute.device), "evaluation_seconds": round(time.monotonic() - started, 1)}
    return Outcome(counts={"pairs": sum(map(len, tables))}, about=about, run=run)


def all_rewards(model: torch.nn.Module, rows: PackedRows, compute: Compute, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Rewards, float64[P, 2], and token counts, int64[P, 2], of all packed pairs, in the order of the rows. Args: what: names
    it in messages."""

    def forward(chosen: list[dict[str, Any]]) -> tuple[Batch, torch.Tensor]:
        batch = collate_pairs(chosen, compute.kernel).to(compute.device)
        return batch, packed_rewards(model, batch)

    model.eval()
    rewards, counts = [], []
    for batch, rewards_P2 in over_all_rows(rows, compute, what, forward):
        rewards.append(rewards_P2.double().cpu().numpy())
        counts.append(batch["completion_tokens"].reshape(-1, 2).cpu().numpy())
    return np.concatenate(rewards), np.concatenate(counts)


def reward_scores(rewards_P2: np.ndarray) -> dict[str, Any]:
    """Share of pairs whose chosen completion has the higher reward, equal ones counting half, and means; each with its 95%
    interval."""
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    means = {"reward_margin": margin_P, "chosen_reward": rewards_P2[:, 0], "rejected_reward": rewards_P2[:, 1]}
    scores = {"pairs": len(margin_P), **accuracy("reward_accuracy", margin_P)}
    for name, values_P in means.items():
        scores |= mean(name, values_P)
    return scores


def calibration_scores(rewards_P2: np.ndarray) -> dict[str, Any]:
    """How far the size of a margin says how often the model is right.

    `by_margin`: accuracy of GROUPS groups of pairs, from the smallest to the largest margin. `calibration`: in BINS bins of the
    probability that the model gives to the completion that it prefers, sigmoid(|margin|), its mean and the accuracy;
    `calibration_error` is their mean difference, weighted by pairs.

    >>> rewards = np.array([[0.1, 0.0], [0.0, 0.1], [3.0, 0.0], [3.0, 0.0]])
    >>> scores = calibration_scores(rewards)
    >>> [(one["pairs"], one["predicted"], one["accuracy"]) for one in scores["calibration"]], scores["calibration_error"]
    ([(2, 0.525, 0.5), (2, 0.9526, 1.0)], 0.0362)
    """
    margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    size_P = np.abs(margin_P)
    groups = []
    for own in np.array_split(np.argsort(size_P, kind="stable"), min(GROUPS, len(size_P))):
        bounds = {"from": round(float(size_P[own].min()), 4), "to": round(float(size_P[own].max()), 4)}
        groups.append(bounds | {"pairs": len(own)} | accuracy("accuracy", margin_P[own]))
    predicted_P = 1 / (1 + np.exp(-size_P))
    bin_P = np.minimum((2 * BINS * (predicted_P - 0.5)).astype(int), BINS - 1)
    bins, error = [], 0.0
    for number in np.unique(bin_P).tolist():
        own = bin_P == number
        predicted, right = float(predicted_P[own].mean()), float(wins(margin_P[own]).mean())
        error += own.sum() / len(own) * abs(predicted - right)
        bounds = {"from": 0.5 + number / (2 * BINS), "to": 0.5 + (number + 1) / (2 * BINS)}
        bins.append(
            bounds | {"pairs": int(own.sum()), "predicted": round(predicted, 4)} | accuracy("accuracy", margin_P[own])
        )
    return {"by_margin": groups, "calibration": bins, "calibration_error": round(float(error), 4)}
