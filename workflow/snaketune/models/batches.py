"""Rows of a shard to the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.models.attention import Segments, segments_for
from snaketune.packing.segments import layout
from snaketune.packing.shards import IGNORED


def collate(rows: Sequence[dict[str, Any]], kernel: str) -> dict[str, Any]:
    """B rows, laid end to end (T tokens in all).

    Returns:
        input_ids: int64[1, T].
        segments: the layout, as `kernel` wants it.
        sources, targets: int64[N], for each of the N supervised tokens the position that predicts it, and its id.
        target_segments: int64[N], the segment that each supervised token is in.
        tokens: tokens without padding.
    """
    placed = layout(
        [row["segment_lengths"] for row in rows],
        [row["prefix_lengths"] for row in rows],
        row_lengths=[len(row["input_ids"]) for row in rows],
    )
    labels_T = np.concatenate([row["labels"] for row in rows])
    supervised_N = np.flatnonzero((labels_T != IGNORED) & (placed.parents >= 0))
    return {
        "input_ids": torch.from_numpy(np.concatenate([row["input_ids"] for row in rows]).astype(np.int64))[None],
        "segments": segments_for(kernel, placed),
        "sources": torch.from_numpy(placed.parents[supervised_N]),
        "targets": torch.from_numpy(labels_T[supervised_N].astype(np.int64)),
        "target_segments": torch.from_numpy(placed.segment_of[supervised_N]),
        "tokens": int(sum(int(np.sum(row["segment_lengths"])) for row in rows)),
    }


def forward_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What a causal language model's forward is given: logits come back for the predicting positions only."""
    segments: Segments = batch["segments"]
    return {
        "input_ids": batch["input_ids"],
        "position_ids": segments.positions_T[None],
        "segments": segments,
        "logits_to_keep": batch["sources"],
        "use_cache": False,
    }
