"""Log-probabilities of supervised tokens, and their sums by completion.

Shapes: N supervised tokens, C completions, M of the tokens by completion, V vocabulary, P pairs. Only the positions that
predict a supervised token are projected to the vocabulary, a chunk of them at a time (`models.chunked_head`), so the head costs
N x V and not T x V, and never holds as much.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.auto_batch import AutoBatch
from snaketune.models.batches import Batch, collate
from snaketune.models.device_memory import is_out_of_memory, reset_peak_memory
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
    source_N = batch["sources"][batch["source_rows"]]
    for document, (places_L, _) in enumerate(segments.layout.sequences()):
        own_N = batch["target_documents"] == document
        if not own_N.any():
            continue
        inputs = {"input_ids": batch["input_ids"][:, torch.from_numpy(places_L)], "use_cache": False}
        # Positions count from a sequence's beginning, so they are its columns.
        logits_1NV = logits_at(model, inputs, segments.positions_T[source_N[own_N]])
        losses_N[own_N] = F.cross_entropy(logits_1NV[0].float(), batch["targets"][own_N], reduction="none")
    return losses_N


def completion_logprobs(losses_N: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities and token counts of the completions of packed pairs.

    Args:
        losses_N: negative log-probabilities of the batch's supervised tokens.
    Returns:
        float32[C] sums and int64[C] counts, in the order of rows and their `completions`: chosen, rejected, chosen, ...
    """
    counts_C = batch["completion_tokens"]
    member_losses_M = losses_N.index_select(0, batch["members"])
    return losses_N.new_zeros(len(counts_C)).index_add(0, batch["member_completions"], -member_losses_M), counts_C


def pair_logprobs(losses_N: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by pairs: float32[P, 2] and int64[P, 2], chosen first."""
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    return sums_C.reshape(-1, 2), counts_C.reshape(-1, 2)


def losses_by_batch(model: torch.nn.Module, rows: PackedRows, compute: Compute, what: str):
    """Run all rows through `model`, in order; where memory runs out, half as many of them at once.

    Args:
        compute: with SEPARATE as its kernel, one sequence at a time.
    Yields:
        Each batch, and its float32[N] losses.
    """
    done = ((batch, losses_N) for _, batch, losses_N in losses_of_rows(model, rows, range(len(rows)), compute, what))
    at_once = AutoBatch(rows.row_length, compute.device).rows
    yield from progress(done, what, "batches", -(-len(rows) // at_once))


def losses_of_rows(
    model: torch.nn.Module, rows: PackedRows, numbers: Sequence[int], compute: Compute, what: str
) -> Iterator[tuple[Sequence[int], dict[str, Any], torch.Tensor]]:
    """The same for some of the rows, whose numbers come with each batch."""
    model.eval()
    at_once, done = AutoBatch(rows.row_length, compute.device), 0
    while done < len(numbers):
        some, found, started = numbers[done : done + at_once.rows], None, time.monotonic()
        try:
            found = _forward(model, [rows[row] for row in some], compute)
        except Exception as error:
            if at_once.rows == 1 or not is_out_of_memory(error):
                raise
        if found is None:
            # Not in the handler, whose traceback holds on to tensors.
            at_once.is_out_of_memory()
            reset_peak_memory(compute.device)
            print(f"{what}: out of memory; going on with {at_once.rows} rows at once", flush=True)
            continue
        if at_once.grows and len(some) == at_once.rows:
            if compute.device.type != "cpu":
                torch.accelerator.synchronize(compute.device)
            at_once.passed(found[0]["segments"].layout.document_tokens, time.monotonic() - started)
        done += len(some)
        yield some, *found


@torch.no_grad()
def _forward(model: torch.nn.Module, rows: list[dict[str, Any]], compute: Compute) -> tuple[Batch, torch.Tensor]:
    separate = compute.kernel == SEPARATE
    batch = collate(rows, "sdpa" if separate else compute.kernel).to(compute.device)
    with compute.autocast():
        return batch, (separate_token_losses if separate else token_losses)(model, batch)


def all_pair_logprobs(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[P, 2] summed log-probabilities and int64[P, 2] token counts of all packed pairs, in the order of the rows."""
    sums, counts = [], []
    for batch, losses_N in losses_by_batch(model, rows, compute, what):
        sums_P2, counts_P2 = pair_logprobs(losses_N, batch)
        sums.append(sums_P2.double().cpu())
        counts.append(counts_P2.cpu())
    return torch.cat(sums), torch.cat(counts)
