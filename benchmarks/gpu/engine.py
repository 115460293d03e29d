"""What is measured of the engine: its loss, with chunks and without."""

from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.forward import logits_at, packed_inputs
from snaketune.models.logprobs import summed_losses


def batch_loss(model: torch.nn.Module, batch: dict[str, Any], *, chunked: bool) -> torch.Tensor:
    """The batch's loss, summed over its supervised tokens; without chunks, by all of their logits at once."""
    if chunked:
        return summed_losses(model, batch)
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0][batch["source_rows"]]
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="sum")
