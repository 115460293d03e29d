"""Collation of packed rows into the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.engine.model.kernels import ANY_SHAPE, segments_for
from snaketune.engine.packing.rows import TOKENS
from snaketune.engine.packing.segments import SegmentLayout, layout_of
from snaketune.engine.packing.shards import IGNORED

# Columns of a row that have an entry per pair.
PAIR_COLUMNS = ("reference", "source", "desirable", "margin")


class Batch(dict):
    """The tensors of one forward pass by name, with host-side values beside them. Moves between devices like a tensor, and
    casts nothing: reference log-probabilities stay float32 whatever the compute data type."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return a copy on `device`; copies to a GPU never block (accelerate's own setting is lost in the first epoch after
        a resume)."""
        options = {"non_blocking": non_blocking or torch.device(device).type == "cuda"}
        movable = {name: value for name, value in self.items() if hasattr(value, "to")}
        return self | {name: value.to(device, **options) for name, value in movable.items()}

    def __or__(self, other: dict[str, Any]) -> "Batch":
        return Batch(super().__or__(other))


def collate(rows: Sequence[dict[str, Any]], kernel: str, longest: int | None = None, prompts: bool = False) -> Batch:
    """Concatenate rows into one sequence of T tokens, without padding for kernels that take any shape.

    Example: the pair [abCD][EF] of `segments` with C to F supervised; b predicts both C and E, and is projected once.

        sources [1, 2, 4]   source_rows [0, 1, 0, 2]   targets [C, D, E, F]   members [0, 1, 2, 3]
                                                                              member_completions [0, 0, 1, 1]

    Args:
        longest: tokens of the run's longest document including its prefix; default: that of these rows.
        prompts: for pairs, whether the prompts of chosen completions are supervised too; they are members of no completion.

    Returns:
        input_ids: int64[1, T].
        segments: the layout in the form that `kernel` needs.
        sources: int64[U], the positions that predict a supervised token, each once; U is N unless some predict several.
        source_rows, targets: int64[N], for each of the N supervised tokens the index of its source, and its id.
        target_documents: int64[N], the document of each supervised token.
        weights: float32[N], the weight of each supervised token in the loss, if rows have weights; and `weight`, their sum.
        members, member_completions: int64[M], for preferences: (token, completion) pairs as indices into the N tokens and the
            C completions. A token shared by several completions counts for each of them.
        completion_tokens: int64[C], for preferences: the number of tokens of each completion.
        sequence_members, sequence_pairs: int64, with `prompts`: (token, pair) pairs, for the tokens of chosen sequences.
    """
    if kernel in ANY_SHAPE:
        rows = _without_padding(rows)
    layout = layout_of(rows)
    ids_T = np.concatenate([row["input_ids"] for row in rows]).astype(np.int64)
    is_target_T = layout.parents >= 0
    labelled_T = (np.concatenate([row["labels"] for row in rows]) != IGNORED) & is_target_T
    supervised_T = labelled_T
    if prompts:
        supervised_T = labelled_T.copy()
        supervised_T[layout.sequences_of(layout.completions[::2])[0]] = True
        supervised_T &= is_target_T
    supervised_N = np.flatnonzero(supervised_T)
    sources_U, rows_N = layout.parents[supervised_N], np.arange(len(supervised_N))
    if layout.prefixed:
        sources_U, rows_N = np.unique(sources_U, return_inverse=True)
    arrays = {
        "sources": sources_U,
        "source_rows": rows_N,
        "targets": ids_T[supervised_N],
        "target_documents": layout.document_of[supervised_N],
    }
    weights = {}
    if "loss_weights" in rows[0]:
        arrays["weights"] = np.concatenate([row["loss_weights"] for row in rows])[supervised_N]
        weights["weight"] = float(arrays["weights"].sum())
    of_preferences = "completions" in rows[0]
    if of_preferences:
        index_T = np.full(layout.tokens, -1)
        index_T[supervised_N] = np.arange(len(supervised_N))
        members, completions = _members(layout, layout.completions, np.where(labelled_T, index_T, -1))
        counts = np.bincount(completions, minlength=len(layout.completions))
        arrays |= {"members": members, "member_completions": completions, "completion_tokens": counts}
        if prompts:
            members, pairs = _members(layout, layout.completions[::2], index_T)
            arrays |= {"sequence_members": members, "sequence_pairs": pairs}
    segments = segments_for(kernel, layout, longest, any_prefixes="prefix_segments" in rows[0])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch({"input_ids": torch.from_numpy(ids_T)[None], "segments": segments} | tensors | weights)


def pair_columns(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The columns of rows that have an entry per pair."""
    columns = [name for name in PAIR_COLUMNS if name in rows[0]]
    return {name: torch.from_numpy(np.concatenate([row[name] for row in rows])) for name in columns}


def _without_padding(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    used = [int(row["segment_lengths"].sum()) for row in rows]
    # An empty batch retains one token, since models can't run on an empty sequence.
    used[0] = used[0] or int(not any(used))
    return [
        row | {name: row[name][:tokens] for name in TOKENS if name in row} for row, tokens in zip(rows, used) if tokens
    ]


def _members(layout: SegmentLayout, segments_C: np.ndarray, index_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of tokens (`index_T`, -1: none) in the full sequences of `segments_C`, and the sequence of each."""
    tokens_Q, offsets = layout.sequences_of(segments_C)
    member_Q, sequence_Q = index_T[tokens_Q], np.repeat(np.arange(len(segments_C)), np.diff(offsets))
    return member_Q[member_Q >= 0], sequence_Q[member_Q >= 0]
