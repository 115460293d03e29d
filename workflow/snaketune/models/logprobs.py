"""Log-probabilities of supervised tokens, and their sums by completion.

Shapes: N supervised tokens, V vocabulary, P pairs. Only the positions that predict a supervised token are projected to the
vocabulary, so the cost of the head is N x V and not T x V.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from snaketune.models.batches import collate, separate_sequences, supervised_places
from snaketune.models.forward import logits_at, packed_logits
from snaketune.packing.reader import PackedRows
from snaketune.stages.progress import progress

# In the place of a kernel's name: no packed forward, every sequence alone.
SEPARATE = "separate"


def token_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Negative log-probability of each supervised token, float32[N]."""
    return F.cross_entropy(packed_logits(model, batch).float(), batch["targets"], reduction="none")


def separate_token_losses(
    model: torch.nn.Module, rows: Sequence[dict[str, Any]], batch: dict[str, Any]
) -> torch.Tensor:
    """The same, float32[N], with every sequence run alone by the model's own attention: slow, and right for any model."""
    input_ids_1T = batch["input_ids"]
    source_of = {place: i for i, place in enumerate(supervised_places(rows).tolist())}
    losses_N = torch.zeros(len(source_of), device=input_ids_1T.device)
    for places_L, prefix in separate_sequences(rows):
        columns = [c for c in range(max(prefix, 1), len(places_L)) if int(places_L[c]) in source_of]
        if not columns:
            continue
        order = torch.tensor([source_of[int(places_L[c])] for c in columns], device=losses_N.device)
        inputs = {"input_ids": input_ids_1T[:, places_L.to(input_ids_1T.device)], "use_cache": False}
        logits_1NV = logits_at(model, inputs, torch.tensor(columns, device=losses_N.device) - 1)
        losses_N[order] = F.cross_entropy(logits_1NV[0].float(), batch["targets"][order], reduction="none")
    return losses_N


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

    Args:
        kernel: of the packed forward, or SEPARATE for one sequence at a time.
    Yields:
        The rows of each batch, the batch itself, and its float32[N] losses.
    """
    model.eval()
    starts = range(0, len(rows), batch_rows)
    for start in progress(starts, what, f"batches of {batch_rows} rows", len(starts)):
        chunk = [rows[r] for r in range(start, min(start + batch_rows, len(rows)))]
        batch = {
            name: value.to(model.device) if hasattr(value, "to") else value
            for name, value in collate(chunk, "sdpa" if kernel == SEPARATE else kernel).items()
        }
        with torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
            losses_N = separate_token_losses(model, chunk, batch) if kernel == SEPARATE else token_losses(model, batch)
        yield chunk, batch, losses_N


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
