"""Log-probabilities of supervised tokens, and their sums by completion.

Shapes: N supervised tokens, V vocabulary, P pairs. Only the positions that predict a supervised token are projected to the
vocabulary, a chunk of them at a time (`models.head`), so the head costs N x V and not T x V, and never holds as much.
"""

from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.batches import collate, on_device
from snaketune.models.devices import Compute
from snaketune.models.forward import logits_at, packed_losses
from snaketune.models.kernels import Segments
from snaketune.packing.reader import PackedRows
from snaketune.stages.progress import progress

# In the place of a kernel's name: no packed forward, every sequence alone.
SEPARATE = "separate"


def token_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Negative log-probability of each supervised token, float32[N]."""
    return packed_losses(model, batch, summed=False)


def summed_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Their sum, float32 scalar, whose gradients cost less."""
    return packed_losses(model, batch, summed=True)


def separate_token_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The same, float32[N], with every sequence run alone by the model's own attention: slow, and right for any model."""
    segments: Segments = batch["segments"]
    losses_N = torch.zeros(len(batch["targets"]), device=batch["targets"].device)
    for document, (places_L, _) in enumerate(segments.layout.sequences()):
        own_N = batch["target_documents"] == document
        if not own_N.any():
            continue
        inputs = {"input_ids": batch["input_ids"][:, torch.from_numpy(places_L)], "use_cache": False}
        # Positions count from a sequence's beginning, so they are its columns.
        logits_1NV = logits_at(model, inputs, segments.positions_T[batch["sources"][own_N]])
        losses_N[own_N] = F.cross_entropy(logits_1NV[0].float(), batch["targets"][own_N], reduction="none")
    return losses_N


def pair_logprobs(losses_N: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities and token counts of the completions of packed pairs.

    Documents alternate chosen, rejected, so pair p of the batch is made of its documents 2p and 2p + 1.

    Args:
        losses_N: negative log-probabilities of the batch's supervised tokens.
    Returns:
        float32[P, 2] sums and int64[P, 2] counts, chosen first, pairs in the order of rows and places.
    """
    documents, document_N = len(batch["segments"].layout.documents), batch["target_documents"]
    sums_D = losses_N.new_zeros(documents).index_add(0, document_N, -losses_N)
    return sums_D.reshape(-1, 2), torch.bincount(document_N, minlength=documents).reshape(-1, 2)


@torch.no_grad()
def losses_by_batch(model: torch.nn.Module, rows: PackedRows, compute: Compute, batch_rows: int, what: str):
    """Run all rows through `model`, in order.

    Args:
        compute: with SEPARATE as its kernel, one sequence at a time.
    Yields:
        Each batch, and its float32[N] losses.
    """
    model.eval()
    separate = compute.kernel == SEPARATE
    starts = range(0, len(rows), batch_rows)
    for start in progress(starts, what, f"batches of {batch_rows} rows", len(starts)):
        chunk = [rows[r] for r in range(start, min(start + batch_rows, len(rows)))]
        batch = on_device(collate(chunk, "sdpa" if separate else compute.kernel), compute.device)
        with compute.autocast():
            losses_N = (separate_token_losses if separate else token_losses)(model, batch)
        yield batch, losses_N


def pair_logprobs_of(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, batch_rows: int, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[P, 2] summed log-probabilities and int64[P, 2] token counts of all packed pairs, in the order of the rows."""
    sums, counts = [], []
    for batch, losses_N in losses_by_batch(model, rows, compute, batch_rows, what):
        sums_P2, counts_P2 = pair_logprobs(losses_N, batch)
        sums.append(sums_P2.double().cpu())
        counts.append(counts_P2.cpu())
    return torch.cat(sums), torch.cat(counts)
