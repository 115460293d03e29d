"""The losses that every way to compute packed rows has to give: each document run alone."""

from typing import Any

import torch
import torch.nn.functional as F

from snaketune.engine.model.forward import logits_at


def losses_alone(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return `token_losses`, float32[N], of sequences that the model, with its own layers, runs one by one."""
    segments = batch["segments"]
    losses_N = torch.zeros(len(batch["targets"]), device=batch["targets"].device)
    source_N = batch["sources"][batch["source_rows"]]
    for document, (positions_L, _) in enumerate(segments.layout.sequences()):
        own_N = batch["target_documents"] == document
        if own_N.any():
            inputs = {"input_ids": batch["input_ids"][:, torch.from_numpy(positions_L)], "use_cache": False}
            # Positions count from the start of a sequence, so they are its column indices.
            logits_1NV = logits_at(model, inputs, segments.positions_T[source_N[own_N]])
            losses_N[own_N] = F.cross_entropy(logits_1NV[0].float(), batch["targets"][own_N], reduction="none")
    return losses_N
