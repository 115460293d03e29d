"""Rows of a shard to the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.models.kernels import Bounds, segments_for
from snaketune.packing.segments import Layout, layout_of
from snaketune.packing.shards import IGNORED


def collate(rows: Sequence[dict[str, Any]], kernel: str, bounds: Bounds | None = None) -> dict[str, Any]:
    """B rows, laid end to end (T tokens in all).

    The pair [abCD][EF] of `packing.segments`, C to F supervised: b predicts both C and E, and is projected once.

        sources [1, 2, 4]   source_rows [0, 1, 0, 2]   targets [C, D, E, F]   members [0, 1, 2, 3]
                                                                              member_completions [0, 0, 1, 1]

    Args:
        bounds: of all batches of a run.

    Returns:
        input_ids: int64[1, T].
        segments: the layout, as `kernel` wants it.
        sources: int64[U], the places that predict a supervised token, each once; U is N unless some predict several.
        source_rows, targets: int64[N], for each of the N supervised tokens which of the sources predicts it, and its id.
        target_documents: int64[N], the document that each supervised token is in.
        members, member_completions: int64[M], of preferences: which of the N tokens count for which of the C completions. One
            that several completions go through counts for each of them.
    """
    placed = layout_of(rows)
    labels_T = np.concatenate([row["labels"] for row in rows])
    supervised_N = np.flatnonzero((labels_T != IGNORED) & (placed.parents >= 0))
    sources_U, rows_N = placed.parents[supervised_N], np.arange(len(supervised_N))
    if placed.prefixed:
        sources_U, rows_N = np.unique(sources_U, return_inverse=True)
    batch = {
        "input_ids": torch.from_numpy(np.concatenate([row["input_ids"] for row in rows]).astype(np.int64))[None],
        "segments": segments_for(kernel, placed, bounds),
        "sources": torch.from_numpy(sources_U),
        "source_rows": torch.from_numpy(rows_N),
        "targets": torch.from_numpy(labels_T[supervised_N].astype(np.int64)),
        "target_documents": torch.from_numpy(placed.document_of[supervised_N]),
    }
    return batch | (_members(placed, supervised_N) if "completions" in rows[0] else {})


def _members(placed: Layout, supervised_N: np.ndarray) -> dict[str, torch.Tensor]:
    """Which supervised tokens each completion goes through."""
    number_T = np.full(placed.tokens, -1)
    number_T[supervised_N] = np.arange(len(supervised_N))
    lengths_C = placed.sequence_lengths[placed.completions]
    completion_Q = np.repeat(np.arange(len(lengths_C)), lengths_C)
    column_Q = np.arange(len(completion_Q)) - np.repeat(np.cumsum(lengths_C) - lengths_C, lengths_C)
    member_Q = number_T[placed.sequence_tokens(placed.completions[completion_Q], column_Q)]
    found_Q = member_Q >= 0
    return {
        "members": torch.from_numpy(member_Q[found_Q]),
        "member_completions": torch.from_numpy(completion_Q[found_Q]),
    }


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch of `collate` on another device."""
    return {name: value.to(device) for name, value in batch.items()}
