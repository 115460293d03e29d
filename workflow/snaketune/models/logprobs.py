"""Log-probabilities of supervised tokens, and their sums by completion.

Shapes: N supervised tokens, V vocabulary, P pairs. Only the positions that predict a supervised token are projected to the
vocabulary, so the cost of the head is N x V and not T x V.
"""

from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.batches import collate, forward_inputs
from snaketune.packing.reader import PackedRows
from snaketune.progress import progress


def token_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Negative log-probability of each supervised token, float32[N]."""
    logits_1NV = model(**forward_inputs(batch)).logits
    return F.cross_entropy(logits_1NV[0].float(), batch["targets"], reduction="none")


def pair_logprobs(
    losses_N: torch.Tensor, target_segments_N: torch.Tensor, segment_lengths: list[list[int]], row_lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities and token counts of the completions of packed pairs.

    Segments alternate chosen, rejected within a row, so pair p of the batch is made of its segments 2p and 2p + 1 (the free
    tokens at a row's end, where there are any, form a segment that is skipped).

    Args:
        losses_N: negative log-probabilities.
        target_segments_N: the segment of each.
        segment_lengths: the column of the shard, row by row.
        row_lengths: tokens of each row, free ones counted.
    Returns:
        float32[P, 2] sums and int64[P, 2] counts, chosen first, pairs in the order of rows and places.
    """
    real, at = [], 0
    for row, row_length in zip(segment_lengths, row_lengths, strict=True):
        real += range(at, at + len(row))
        at += len(row) + (int(sum(row)) < row_length)
    sums_S = losses_N.new_zeros(at).index_add(0, target_segments_N, -losses_N)
    counts_S = torch.bincount(target_segments_N, minlength=at)
    pairs = torch.tensor(real, dtype=torch.long, device=losses_N.device).reshape(-1, 2)
    return sums_S[pairs], counts_S[pairs]


@torch.no_grad()
def losses_by_batch(
    model: torch.nn.Module, rows: PackedRows, kernel: str, dtype: torch.dtype, batch_rows: int, what: str
):
    """Run all rows through `model`, in order.

    Yields:
        The rows of each batch, the batch itself, and its float32[N] losses.
    """
    model.eval()
    starts = range(0, len(rows), batch_rows)
    for start in progress(starts, what, f"batches of {batch_rows} rows", len(starts)):
        chunk = [rows[r] for r in range(start, min(start + batch_rows, len(rows)))]
        batch = {
            name: value.to(model.device) if hasattr(value, "to") else value
            for name, value in collate(chunk, kernel).items()
        }
        with torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
            yield chunk, batch, token_losses(model, batch)


def pair_logprobs_of(
    model: torch.nn.Module, rows: PackedRows, kernel: str, dtype: torch.dtype, batch_rows: int, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[P, 2] summed log-probabilities and int64[P, 2] token counts of all packed pairs, in the order of the rows."""
    sums, counts = [], []
    for chunk, batch, losses_N in losses_by_batch(model, rows, kernel, dtype, batch_rows, what):
        sums_P2, counts_P2 = pair_logprobs(
            losses_N,
            batch["target_segments"],
            [row["segment_lengths"].tolist() for row in chunk],
            [len(row["input_ids"]) for row in chunk],
        )
        sums.append(sums_P2.double().cpu())
        counts.append(counts_P2.cpu())
    return torch.cat(sums), torch.cat(counts)
