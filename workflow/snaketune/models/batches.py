"""Rows of a shard to the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.models.attention import segments_for
from snaketune.packing.segments import Layout, layout
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
    placed = layout_of(rows)
    labels_T, supervised_N = _supervised(rows, placed)
    return {
        "input_ids": torch.from_numpy(np.concatenate([row["input_ids"] for row in rows]).astype(np.int64))[None],
        "segments": segments_for(kernel, placed),
        "sources": torch.from_numpy(placed.parents[supervised_N]),
        "targets": torch.from_numpy(labels_T[supervised_N].astype(np.int64)),
        "target_segments": torch.from_numpy(placed.segment_of[supervised_N]),
        "tokens": int(sum(int(np.sum(row["segment_lengths"])) for row in rows)),
    }


def supervised_places(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """int64[N]: where the tokens that loss is taken of are, in the order of `collate`'s targets."""
    return _supervised(rows, layout_of(rows))[1]


def _supervised(rows: Sequence[dict[str, Any]], placed: Layout) -> tuple[np.ndarray, np.ndarray]:
    labels_T = np.concatenate([row["labels"] for row in rows])
    return labels_T, np.flatnonzero((labels_T != IGNORED) & (placed.parents >= 0))


def layout_of(rows: Sequence[dict[str, Any]]) -> Layout:
    """The segments of B rows, laid end to end."""
    return layout(
        [row["segment_lengths"] for row in rows],
        [row["prefix_lengths"] for row in rows],
        row_lengths=[len(row["input_ids"]) for row in rows],
    )


def separate_sequences(rows: Sequence[dict[str, Any]]) -> list[tuple[torch.Tensor, int]]:
    """The sequences that the segments of B rows stand for, one by one, free tokens left out.

    Returns:
        For each its places in the rows laid end to end, int64[L], the shared prefix first, and the prefix's length.
    """
    sequences, row_start = [], 0
    for row in rows:
        at = base = row_start
        for length, prefix in zip(row["segment_lengths"].tolist(), row["prefix_lengths"].tolist()):
            base = base if prefix else at
            sequences.append((torch.tensor([*range(base, base + prefix), *range(at, at + length)]), prefix))
            at += length
        row_start += len(row["input_ids"])
    return sequences
