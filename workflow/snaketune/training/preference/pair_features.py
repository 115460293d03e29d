"""The inputs of a preference loss for a batch of packed pairs: log-probabilities per completion, with the weights of
`ld_alpha`, and the likelihood of chosen completions.
"""

from typing import Any

import torch

from snaketune.config.losses import PreferenceLoss
from snaketune.models.logprobs import completion_logprobs, token_losses
from snaketune.training.preference.dpo_loss import PairLogps


def pair_logps(model: torch.nn.Module, batch: dict[str, Any], settings: PreferenceLoss) -> PairLogps:
    """Compute the log-probabilities of a batch's pairs, in the order of rows and of pairs within a row.

    Args:
        batch: as `DpoTrainer.collate` returns it.
    """
    losses_N = token_losses(model, batch)
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    counts_P2, nll_P = counts_C.reshape(-1, 2), -sums_C[::2]
    with_prompt_P = torch.zeros_like(nll_P)
    if "sequence_members" in batch:
        with_prompt_P = with_prompt_P.index_add(
            0, batch["sequence_pairs"], losses_N.index_select(0, batch["sequence_members"])
        )
    if settings.ld_alpha is not None:
        weights_M = tail_weights(batch["member_completions"], counts_P2, settings.ld_alpha)
        member_losses_M = losses_N.index_select(0, batch["members"])
        sums_C = torch.zeros_like(sums_C).index_add(0, batch["member_completions"], -weights_M * member_losses_M)
    return PairLogps(
        logps_P2=sums_C.reshape(-1, 2),
        reference_P2=batch["reference"],
        counts_P2=counts_P2,
        nll_P2=torch.stack([nll_P, with_prompt_P], dim=1),
        desirable_P=batch.get("desirable"),
    )


def tail_weights(completion_M: torch.Tensor, counts_P2: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weight of each token, float32[M]: 1 up to the length of the pair's shorter completion, `alpha` beyond it (LD-DPO, Liu et
    al., 2024, eq. 9).

    Args:
        completion_M: int64, ascending: the completion of each token.
        counts_P2: int64, tokens per completion.
        alpha: weight of the tokens beyond the shorter completion.

    >>> tail_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([[3, 1]]), 0.5).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    counts_C = counts_P2.reshape(-1)
    offsets_C = counts_C.cumsum(0) - counts_C
    position_M = torch.arange(len(completion_M), device=completion_M.device) - offsets_C[completion_M]
    shared_C = counts_P2.min(dim=1).values.repeat_interleave(2, output_size=len(counts_C))
    return torch.where(position_M < shared_C[completion_M], 1.0, alpha)
