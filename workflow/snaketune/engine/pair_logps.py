"""The inputs of a preference loss: log-probabilities and token counts of pairs, with the weights of `ld_alpha`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import completion_logprobs, losses_by_batch, token_losses
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.preference_settings import PreferenceSettings


@dataclass(frozen=True, kw_only=True)
class PairLogps:
    """Log-probabilities and token counts of P pairs. For unpaired rows, the second completion is that of another row, after
    the same prompt (a mismatched completion).

    Attributes:
        logps_P2: float32, log-probabilities under the policy in nats, chosen first; tokens weighted if `ld_alpha` is set.
        reference_P2: float32, the same under the reference; zeros for losses without a reference.
        counts_P2: int64, tokens per completion.
        nll_P2: float32, negative log-likelihood of the chosen completion, and of prompt plus chosen completion (zeros if no
            loss needs prompts).
        desirable_P: bool, labels of unpaired rows; None for pairs.
    """

    logps_P2: torch.Tensor
    reference_P2: torch.Tensor
    counts_P2: torch.Tensor
    nll_P2: torch.Tensor
    desirable_P: torch.Tensor | None = None

    @property
    def ratios_P2(self) -> torch.Tensor:
        return self.logps_P2 - self.reference_P2

    @property
    def lengths_P2(self) -> torch.Tensor:
        """Tokens per completion, at least 1, as a divisor."""
        return self.counts_P2.clamp(min=1)

    @property
    def features_PF(self) -> torch.Tensor:
        """The F = 4 features that depend on the policy, float32: log-probabilities, likelihood terms."""
        return torch.cat([self.logps_P2, self.nll_P2], dim=1)


def pair_logps(model: torch.nn.Module, batch: dict[str, Any], settings: PreferenceSettings) -> PairLogps:
    """Log-probabilities of the pairs of a batch from `DpoTrainer.collate`, in the order of rows and of pairs within a row."""
    losses_N = token_losses(model, batch)
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    nll_P = -sums_C[::2]
    with_prompt_P = torch.zeros_like(nll_P)
    if "sequence_members" in batch:
        sequence_losses = losses_N.index_select(0, batch["sequence_members"])
        with_prompt_P = with_prompt_P.index_add(0, batch["sequence_pairs"], sequence_losses)
    return PairLogps(
        logps_P2=_weighted(sums_C, counts_C, losses_N, batch, settings.ld_alpha).reshape(-1, 2),
        reference_P2=batch["reference"],
        counts_P2=counts_C.reshape(-1, 2),
        nll_P2=torch.stack([nll_P, with_prompt_P], dim=1),
        desirable_P=batch.get("desirable"),
    )


def _weighted(
    sums_C: torch.Tensor,
    counts_C: torch.Tensor,
    losses_N: torch.Tensor,
    batch: dict[str, Any],
    ld_alpha: float | None,
) -> torch.Tensor:
    """Summed log-probabilities of the completions, float32[C], whose tokens are weighted if `ld_alpha` is set."""
    if ld_alpha is None:
        return sums_C
    weights_M = tail_weights(batch["member_completions"], counts_C.reshape(-1, 2), ld_alpha)
    member_losses_M = losses_N.index_select(0, batch["members"])
    return torch.zeros_like(sums_C).index_add(0, batch["member_completions"], -weights_M * member_losses_M)


def reference_logps(model: torch.nn.Module, rows: PackedRows, compute: Compute, ld_alpha: float | None) -> np.ndarray:
    """Reference log-probabilities of all pairs in the order of the rows, float32[P, 2], chosen first."""
    batches = losses_by_batch(model, rows, compute, "reference")
    sums = [
        _weighted(*completion_logprobs(losses_N, batch), losses_N, batch, ld_alpha).cpu() for batch, losses_N in batches
    ]
    return torch.cat(sums).reshape(-1, 2).numpy()


def tail_weights(completion_M: torch.Tensor, counts_P2: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weight of each token, float32[M]: 1 up to the length of the pair's shorter completion, `alpha` beyond it (LD-DPO, Liu et
    al., 2024, eq. 9). `completion_M`, int64, is the completion of each token, ascending.

    >>> tail_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([[3, 1]]), 0.5).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    counts_C = counts_P2.reshape(-1)
    offsets_C = counts_C.cumsum(0) - counts_C
    position_M = torch.arange(len(completion_M), device=completion_M.device) - offsets_C[completion_M]
    shared_C = counts_P2.min(dim=1).values.repeat_interleave(2, output_size=len(counts_C))
    return torch.where(position_M < shared_C[completion_M], 1.0, alpha)
