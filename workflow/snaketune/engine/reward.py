"""Reward models on packed pairs: Bradley-Terry, on the rewards of a linear head (`engine.model.reward_head`).

    batch       rows of segments: prompt + chosen; and the rejected completion, a segment whose prefix is the prompt, which is
                thus computed once (`engine.packing.segments`); and with `margin` the difference of each pair's ratings
    rewards     the head's output at the last token of each completion, float32[P, 2]
    loss        -log sigmoid(chosen - rejected - margin), mean over the pairs of a step; and with `center_rewards_coefficient`
                that times the mean of (chosen + rejected)^2, which keeps rewards near zero (Eisenstein et al., 2023)

The loss is that of TRL's RewardTrainer. As there, the model's dropout is off.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from snaketune.engine.model.batches import Batch
from snaketune.engine.model.reward_head import packed_rewards, with_reward_head
from snaketune.engine.pair_rewards import RewardSettings, collate_pairs, reward_loss
from snaketune.engine.pair_trainer import PairTrainer
from snaketune.engine.reward_metrics import SUMS, means, pair_sums


class RewardTrainer(PairTrainer):
    """Trainer of a reward model on pairs."""

    balances_experts = False
    answers_prompts = False
    sum_names = SUMS

    settings: RewardSettings

    @staticmethod
    def trained_model(model: PreTrainedModel, seed: int) -> PreTrainedModel:
        return with_reward_head(model, seed)

    # A step, in the order of its calls.

    def collate(self, rows, kernel, longest=None) -> Batch:
        return collate_pairs(rows, kernel, longest)

    def items(self, batch):
        return (batch["pairs"],)

    def batch_loss(self, model, batch, totals):
        rewards_P2 = packed_rewards(model, batch)
        self.metric_sums.add(pair_sums(rewards_P2, batch["source"], self.rows.sources))
        return reward_loss(rewards_P2, self._margins(batch), self.settings, totals[0])

    def _margins(self, batch: dict[str, Any]) -> torch.Tensor | None:
        return batch["margin"] if self.settings.margin else None

    def _loss_of(self, batch):
        self.model.train()
        with self.as_in_training():
            pairs = torch.tensor(batch["pairs"], device=self.args.device)
            return reward_loss(packed_rewards(self.model, batch), self._margins(batch), self.settings, pairs).detach()

    # Metrics.

    def means(self, sums):
        return means(sums)

    def outputs(self, batch):
        rewards_P2, margins_P = packed_rewards(self.model_wrapped, batch), self._margins(batch)
        margins_P = torch.zeros_like(rewards_P2[:, 0]) if margins_P is None else margins_P
        return torch.cat([rewards_P2, margins_P[:, None]], dim=1)

    def score(self, rows_PK, source_P, sources, totals):
        rewards_P2 = rows_PK[:, :2]
        loss = reward_loss(rewards_P2, rows_PK[:, 2], self.settings, totals[0])
        return loss, pair_sums(rewards_P2, source_P, sources)
