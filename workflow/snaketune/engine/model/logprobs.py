"""Log-probabilities of supervised tokens, and their sums by completion, over batches whose size is found automatically.

Shapes: N supervised tokens, C completions, P preference pairs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from snaketune.engine.model.batches import Batch, collate
from snaketune.engine.model.chunked_head import OfLogits
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import packed_losses, packed_values
from snaketune.engine.model.machine import is_out_of_memory, reset_peak_memory
from snaketune.engine.packing.rows import PackedRows
from snaketune.progress import progress

# Tokens of the first batches, by device: enough to keep a GPU busy.
FORWARD_TOKENS = {"cuda": 32768}
FORWARD_TOKENS_ELSEWHERE = 8192
# On a CPU, a matmul of at least so many rows gives each row the same bits whatever the others are; of few rows, kernels for
# vectors and threads' shares of a row or two round otherwise (measured: below 4 with 1 thread, 12 with 2, 28 with 16).
LEAST_ROWS = 64
# Minimum relative gain in throughput for a doubled batch size to be retained.
GAIN = 0.02
# Timed passes of each size; the first of them allocates memory and isn't counted.
PASSES = 3


def token_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the negative log-probability of each supervised token, float32[N]."""
    return packed_losses(model, batch, summed=False)


def summed_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the sum of `token_losses`, a float32 scalar; its backward pass is cheaper than that of the single losses."""
    return packed_losses(model, batch, summed=True)


def completion_logprobs(losses_N: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return summed log-probabilities, float32[C], and token counts, int64[C], of the completions of packed pairs, in the
    order of rows and their `completions`: chosen, rejected, chosen, ..."""
    counts_C = batch["completion_tokens"]
    member_losses_M = losses_N.index_select(0, batch["members"])
    return losses_N.new_zeros(len(counts_C)).index_add(0, batch["member_completions"], -member_losses_M), counts_C


def pair_logprobs(losses_N: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `completion_logprobs` by pair: sums, float32[P, 2], and counts, int64[P, 2], chosen first."""
    sums_C, counts_C = completion_logprobs(losses_N, batch)
    return sums_C.reshape(-1, 2), counts_C.reshape(-1, 2)


def all_pair_logprobs(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return summed log-probabilities, float64[P, 2], and token counts, int64[P, 2], of all packed pairs, in row order."""
    pairs = [pair_logprobs(losses_N, batch) for batch, losses_N in losses_by_batch(model, rows, compute, what)]
    sums, counts = zip(*pairs)
    return torch.cat([block.double().cpu() for block in sums]), torch.cat([block.cpu() for block in counts])


def losses_by_batch(
    model: torch.nn.Module, rows: PackedRows, compute: Compute, what: str
) -> Iterator[tuple[Batch, Any]]:
    """Run all rows through `model` in order, and show progress; yield each batch and its losses, float32[N]. `what` names it in
    messages."""
    model.eval()
    return over_all_rows(rows, compute, what, lambda chosen: _forward(model, chosen, compute, None))


def losses_of_rows(
    model: torch.nn.Module,
    rows: PackedRows,
    indices: Sequence[int],
    compute: Compute,
    what: str,
    of_logits: OfLogits | None = None,
) -> Iterator[tuple[Sequence[int], Batch, Any]]:
    """Run the rows with these indices through `model`; yield each batch's indices, the batch, and its losses, float32[N]; with
    `of_logits`, what `packed_values` returns."""
    model.eval()
    return in_batches(rows, indices, compute, what, lambda chosen: _forward(model, chosen, compute, of_logits))


# Makes a batch of rows, and computes something of it.
Forward = Callable[[list[dict[str, Any]]], tuple[Batch, Any]]


def over_all_rows(rows: PackedRows, compute: Compute, what: str, forward: Forward) -> Iterator[tuple[Batch, Any]]:
    """`in_batches` of all rows, with progress."""
    done = ((batch, result) for _, batch, result in in_batches(rows, range(len(rows)), compute, what, forward))
    return progress(done, what, "batches", -(-len(rows) // AutoBatch(rows.row_length, compute.device).rows))


def in_batches(
    rows: PackedRows, indices: Sequence[int], compute: Compute, what: str, forward: Forward
) -> Iterator[tuple[Sequence[int], Batch, Any]]:
    """Pass the rows with these indices to `forward`, without gradients, in batches that are halved when memory runs out; yield
    the indices of each batch, and what it returns. `what` names it in messages."""
    auto_batch, done = AutoBatch(rows.row_length, compute.device), 0
    while done < len(indices):
        chunk, result, started = indices[done : done + auto_batch.rows], None, time.monotonic()
        try:
            with torch.no_grad(), compute.autocast():
                result = forward([rows[row] for row in chunk])
        except Exception as error:
            if auto_batch.rows == 1 or not is_out_of_memory(error):
                raise
        if result is None:
            # Outside the handler, since its traceback holds references to tensors.
            auto_batch.halve()
            reset_peak_memory(compute.device)
            print(f"{what}: out of memory; continuing with {auto_batch.rows} rows per batch", flush=True)
            continue
        if auto_batch.grows and len(chunk) == auto_batch.rows:
            if compute.device.type != "cpu":
                torch.accelerator.synchronize(compute.device)
            auto_batch.record(result[0]["segments"].layout.document_tokens, time.monotonic() - started)
        done += len(chunk)
        yield chunk, *result


def _forward(
    model: torch.nn.Module, rows: list[dict[str, Any]], compute: Compute, of_logits: OfLogits | None
) -> tuple[Batch, Any]:
    batch = collate(rows, compute.kernel)
    # Tokens that follow those of all rows change nothing but the rounding of the others.
    may_follow = "members" in batch or of_logits is not None
    if may_follow and compute.device.type == "cpu" and len(batch["sources"]) < LEAST_ROWS:
        batch = collate([*rows, _filler(rows[0])], compute.kernel)
    batch = batch.to(compute.device)
    return batch, packed_values(model, batch, of_logits) if of_logits else token_losses(model, batch)


def _filler(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row, with the columns of `row`, whose tokens are in no completion."""
    ids, none = np.zeros(LEAST_ROWS + 1, np.int32), np.empty(0, np.int32)
    zero = np.zeros(1, np.int32)
    columns = {"input_ids": ids, "labels": ids, "loss_weights": ids.astype(np.float32)}
    columns |= {
        "segment_lengths": zero + len(ids),
        "prefix_lengths": zero,
        "prefix_segments": zero,
        "completions": none,
    }
    return {name: columns[name] for name in row if name in columns}


class AutoBatch:
    """Batch size in rows (`rows`) of forward passes without gradients, adjusted to throughput and memory.

    On a GPU, each batch size is timed for a few passes and doubled as long as throughput grows; when memory runs out, it is
    halved. On a CPU, larger batches gain nothing (they outgrow its caches), so the size is constant, which makes an interrupted
    pass sum exactly as an uninterrupted one.
    """

    def __init__(self, row_length: int, device: torch.device):
        self.rows = max(1, FORWARD_TOKENS.get(device.type, FORWARD_TOKENS_ELSEWHERE) // row_length)
        self.grows = device.type == "cuda"
        self.rate = 0.0
        self._passes: list[tuple[int, float]] = []

    def record(self, tokens: int, seconds: float) -> None:
        """Record a forward pass over a full batch, and adjust `rows`.

        >>> search = AutoBatch(1024, torch.device("cpu"))
        >>> search.grows = True
        >>> for rows, seconds in ((8, 4.0), (8, 2.0), (8, 2.0), *[(16, 3.0)] * 3, *[(32, 6.0)] * 3):
        ...     assert search.rows == rows
        ...     search.record(rows * 1024, seconds)
        >>> search.rows, search.grows
        (16, False)
        """
        self._passes.append((tokens, seconds))
        if not self.grows or len(self._passes) < PASSES:
            return
        counted_tokens, counted_seconds = map(sum, zip(*self._passes[1:]))
        rate = counted_tokens / max(counted_seconds, 1e-9)
        self.grows = rate > (1 + GAIN) * self.rate
        self.rows = self.rows * 2 if self.grows else self.rows // 2
        self.rate, self._passes = rate, []

    def halve(self) -> None:
        """Halve the batch size after an out-of-memory error, and stop growing."""
        self.rows //= 2
        self.grows = False
