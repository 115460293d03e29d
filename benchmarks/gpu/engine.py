"""The loss that the engine benchmark measures, with and without chunks."""

from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.forward import logits_at, packed_inputs
from snaketune.models.logprobs import summed_losses


def batch_loss(model: torch.nn.Module, batch: dict[str, Any], *, chunked: bool) -> torch.Tensor:
    """Return the summed loss of a batch's supervised tokens, in chunks or from all logits together."""
    if chunked:
        return summed_losses(model, batch)
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0][batch["source_rows"]]
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="sum")
