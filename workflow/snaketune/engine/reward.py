"""Reward models on packed pairs: Bradley-Terry, on the rewards of a linear head (`engine.model.reward_head`).

    batch       rows of segments: prompt + chosen; and the rejected completion, a segment whose prefix is the prompt, which is
                thus computed once (`engine.packing.segments`); and with `margin` the difference of each pair's ratings
    rewards     the head's output at the last token of each completion, float32[P, 2]
    loss        -log sigmoid(chosen - rejected - margin), mean over the pairs of a step; and with `center_rewards_coefficient`
                that times the mean of (chosen + rejected)^2, which keeps rewards near zero (Eisenstein et al., 2023)

The loss is that of TRL's RewardTrainer. As there, the model's dropout is off.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snaketune.engine.model.batches import Batch
from snaketune.engine.model.reward_head import packed_rewards, with_reward_head
from snaketune.engine.pair_rewards import RewardSettings, collate_pairs, reward_loss
from snaketune.engine.reward_metrics import SUMS, metrics_of, pair_sums
from snaketune.engine.trainer import PackedTrainer

METRICS_STATE = "reward_metrics.json"


class RewardTrainer(PackedTrainer):
    """Trainer of a reward model on pairs."""

    # TRL turns it off, too.
    drops_out = False
    sums_losses = False
    balances_experts = False
    answers_prompts = False

    settings: RewardSettings
    # By source: the sums over the pairs of this process since they were last added to `unlogged`; and those of all processes
    # since the last log line, which are part of checkpoints.
    sums_SK: torch.Tensor | float
    unlogged: list[list[float]]

    def __init__(self, *, settings: RewardSettings, **arguments: Any):
        self.settings, self.sums_SK = settings, 0.0
        super().__init__(**arguments)
        self.unlogged = self._no_sums()

    @staticmethod
    def trained_model(model: PreTrainedModel, seed: int) -> PreTrainedModel:
        return with_reward_head(model, seed)

    def counts(self):
        return super().counts() | {"pairs": self.rows.pairs}

    # A step, in the order of its calls.

    def collate(self, rows, kernel, longest=None) -> Batch:
        return collate_pairs(rows, kernel, longest)

    def items(self, batch):
        return (batch["pairs"],)

    def batch_loss(self, model, batch, totals):
        rewards_P2 = packed_rewards(model, batch)
        self.sums_SK = self.sums_SK + pair_sums(rewards_P2.detach(), batch["source"], self.rows.sources)
        return reward_loss(rewards_P2, self._margins(batch), self.settings, totals[0])

    def _margins(self, batch: dict[str, Any]) -> torch.Tensor | None:
        return batch["margin"] if self.settings.margin else None

    def _loss_of(self, batch):
        self.model.train()
        with self.as_in_training():
            pairs = torch.tensor(batch["pairs"], device=self.args.device)
            return reward_loss(packed_rewards(self.model, batch), self._margins(batch), self.settings, pairs).detach()

    # Metrics.

    def _no_sums(self) -> list[list[float]]:
        return [[0.0] * len(SUMS) for _ in range(self.rows.sources)]

    def _read_sums(self) -> None:
        """Add the sums of all processes to `unlogged`. A collective operation."""
        if isinstance(self.sums_SK, float):
            return
        sums_SK, self.sums_SK = self.sums_SK, 0.0
        if self.gather_processes:
            sums_SK = self.gather_processes(sums_SK[None]).sum(0)
        self.unlogged = (torch.tensor(self.unlogged, dtype=torch.float64) + sums_SK.double().cpu()).tolist()

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            self._read_sums()
            logs |= metrics_of(self.unlogged)
            self.unlogged = self._no_sums()
        super().log(logs, *arguments, **keywords)

    def held_out_metrics(self, batches):
        blocks = []
        for batch in batches:
            margins_P = self._margins(batch)
            rewards_P2 = packed_rewards(self.model_wrapped, batch)
            margins_P = torch.zeros_like(rewards_P2[:, 0]) if margins_P is None else margins_P
            blocks.append(torch.cat([rewards_P2, margins_P[:, None], batch["source"][:, None].float()], dim=1))
        rows_PK, _ = self.gather_pairs(torch.cat(blocks))
        rewards_P2, margins_P, source_P = rows_PK[:, :2], rows_PK[:, 2], rows_PK[:, 3].long()
        loss = reward_loss(rewards_P2, margins_P, self.settings, torch.tensor(len(rows_PK)))
        return {"loss": float(loss)} | metrics_of(pair_sums(rewards_P2, source_P, self.held_out.rows.sources).tolist())

    # Checkpoints.

    def _save_checkpoint(self, model, trial):
        self._read_sums()
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            (self.checkpoint_folder / METRICS_STATE).write_text(json.dumps(self.unlogged), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.unlogged = json.loads((Path(resume_from_checkpoint) / METRICS_STATE).read_text(encoding="utf-8"))
