"""Rows of a shard to the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.models.kernels import Bounds, segments_for
from snaketune.packing.segments import layout_of
from snaketune.packing.shards import IGNORED


def collate(rows: Sequence[dict[str, Any]], kernel: str, bounds: Bounds | None = None) -> dict[str, Any]:
    """B rows, laid end to end (T tokens in all).

    Args:
        bounds: of all batches of a run.

    Returns:
        input_ids: int64[1, T].
        segments: the layout, as `kernel` wants it.
        sources, targets: int64[N], for each of the N supervised tokens the position that predicts it, and its id.
        target_documents: int64[N], the document that each supervised token is in.
    """
    placed = layout_of(rows)
    labels_T = np.concatenate([row["labels"] for row in rows])
    supervised_N = np.flatnonzero((labels_T != IGNORED) & (placed.parents >= 0))
    return {
        "input_ids": torch.from_numpy(np.concatenate([row["input_ids"] for row in rows]).astype(np.int64))[None],
        "segments": segments_for(kernel, placed, bounds),
        "sources": torch.from_numpy(placed.parents[supervised_N]),
        "targets": torch.from_numpy(labels_T[supervised_N].astype(np.int64)),
        "target_documents": torch.from_numpy(placed.document_of[supervised_N]),
    }


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch of `collate` on another device."""
    return {name: value.to(device) for name, value in batch.items()}
