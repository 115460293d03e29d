"""What a loss is told of a batch of packed pairs: log-probabilities by completion, weighted where tails count less, and the
likelihood of chosen completions.
"""

from typing import Any

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.models.logprobs import completion_logprobs, token_losses
from snaketune.training.preference.dpo_loss import Pairs


def pairs_of(model: torch.nn.Module, batch: dict[str, Any], told: PreferenceLoss) -> Pairs:
    """The pairs of a batch of `DpoTrainer`, in the order of rows and places."""
    losses_N = token_losses(model, batch)
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    counts_P2, nll_P = counts_C.reshape(-1, 2), -sums_C[::2]
    with_prompt_P = torch.zeros_like(nll_P)
    if "sequence_members" in batch:
        with_prompt_P = with_prompt_P.index_add(
            0, batch["sequence_pairs"], losses_N.index_select(0, batch["sequence_members"])
        )
    if told.ld_alpha is not None:
        weights_M = tail_weights(batch["member_completions"], counts_P2, told.ld_alpha)
        member_losses_M = losses_N.index_select(0, batch["members"])
        sums_C = torch.zeros_like(sums_C).index_add(0, batch["member_completions"], -weights_M * member_losses_M)
    return Pairs(
        logps_P2=sums_C.reshape(-1, 2),
        reference_P2=batch["reference"],
        counts_P2=counts_P2,
        nll_P2=torch.stack([nll_P, with_prompt_P], dim=1),
        desirable_P=batch.get("desirable"),
    )


def tail_weights(completion_M: torch.Tensor, counts_P2: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weight of each token by completion, float32[M]: 1 as long as both completions of the pair go on, then `alpha`
    (Liu et al., 2024, eq. 9).

    Args:
        completion_M: int64, rising; the tokens of each completion in their order.

    >>> tail_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([[3, 1]]), 0.5).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    counts_C = counts_P2.reshape(-1)
    starts_C = counts_C.cumsum(0) - counts_C
    place_M = torch.arange(len(completion_M), device=completion_M.device) - starts_C[completion_M]
    shared_C = counts_P2.min(dim=1).values.repeat_interleave(2, output_size=len(counts_C))
    return torch.where(place_M < shared_C[completion_M], 1.0, alpha)
