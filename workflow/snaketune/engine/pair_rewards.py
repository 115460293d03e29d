"""The pairs of a reward model: their batches, and the loss of their rewards (Bradley-Terry), as in TRL's RewardTrainer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from snaketune.engine.model.batches import Batch, collate, pair_columns
from snaketune.engine.model.reward_head import completion_ends


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The parameters of the loss, by their names in TRL.

    Attributes:
        center_rewards_coefficient: None for no term that centers rewards.
        margin: whether the rewards of a pair are to differ by more, the more its ratings do.
    """

    center_rewards_coefficient: float | None = None
    margin: bool = False


def reward_loss(
    rewards_P2: torch.Tensor, margins_P: torch.Tensor | None, settings: RewardSettings, pairs: torch.Tensor
) -> torch.Tensor:
    """The share of the step's loss that these pairs contribute, a float32 scalar. Args: pairs: of the whole step.

    >>> rewards, settings = torch.tensor([[2.0, 1.0]]), RewardSettings(center_rewards_coefficient=0.1)
    >>> round(reward_loss(rewards, torch.tensor([1.0]), settings, torch.tensor(1)).item(), 4)    # log 2 + 0.1 * 9
    1.5931
    """
    difference_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    if margins_P is not None:
        difference_P = difference_P - margins_P
    total = -F.logsigmoid(difference_P).sum()
    if settings.center_rewards_coefficient is not None:
        total = total + settings.center_rewards_coefficient * rewards_P2.sum(1).square().sum()
    return total / pairs.clamp(min=1)


def collate_pairs(rows: list[dict[str, Any]], kernel: str, longest: int | None = None) -> Batch:
    """A batch of pairs as `collate` makes it, with `ends`, the last token of each completion, and the columns of pairs."""
    batch = collate(rows, kernel, longest)
    ends = completion_ends(batch["segments"].layout)
    # Counted on the host, so that no step waits for the device.
    return batch | pair_columns(rows) | {"ends": ends, "pairs": len(ends) // 2}
