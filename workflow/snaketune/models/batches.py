"""Rows of a shard to the tensors of one forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snaketune.models.kernels import ANY_SHAPE, segments_for
from snaketune.packing.reader import TOKENS
from snaketune.packing.segments import Layout, layout_of
from snaketune.packing.shards import IGNORED


class Batch(dict):
    """The tensors of one forward pass by name, and what the host knows of them. Moves between devices like a tensor.

    Nothing is cast: reference log-probabilities stay float32 whatever the model computes in.
    """

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """On another device; to a GPU without waiting for what it is still computing.

        accelerate's own setting for that (`non_blocking`) is lost for the first epoch after a resume.
        """
        beside = non_blocking or torch.device(device).type == "cuda"
        moved = {
            name: value.to(device, non_blocking=beside) if hasattr(value, "to") else value
            for name, value in self.items()
        }
        return Batch(moved)

    def __or__(self, other: dict[str, Any]) -> "Batch":
        return Batch(super().__or__(other))


def collate(rows: Sequence[dict[str, Any]], kernel: str, longest: int | None = None, prompts: bool = False) -> Batch:
    """B rows, laid end to end (T tokens in all); for kernels that gain from it, without the free tokens of each.

    The pair [abCD][EF] of `packing.segments`, C to F supervised: b predicts both C and E, and is projected once.

        sources [1, 2, 4]   source_rows [0, 1, 0, 2]   targets [C, D, E, F]   members [0, 1, 2, 3]
                                                                              member_completions [0, 0, 1, 1]

    Args:
        longest: tokens of the longest document of a run with its prefix; default: of these rows.
        prompts: of pairs, whether the prompts of chosen completions are supervised too; they are members of no completion.

    Returns:
        input_ids: int64[1, T].
        segments: the layout, as `kernel` wants it.
        sources: int64[U], the places that predict a supervised token, each once; U is N unless some predict several.
        source_rows, targets: int64[N], for each of the N supervised tokens which of the sources predicts it, and its id.
        target_documents: int64[N], the document that each supervised token is in.
        members, member_completions: int64[M], of preferences: which of the N tokens count for which of the C completions. One
            that several completions go through counts for each of them.
        completion_tokens: int64[C], of preferences: how many tokens each completion has.
        sequence_members, sequence_pairs: int64, with `prompts`: which of the N tokens are in which pair's chosen sequence.
    """
    if kernel in ANY_SHAPE:
        rows = _without_free_tokens(rows)
    placed = layout_of(rows)
    labels_T = np.concatenate([row["labels"] for row in rows])
    ids_T = np.concatenate([row["input_ids"] for row in rows]).astype(np.int64)
    labelled_T = (labels_T != IGNORED) & (placed.parents >= 0)
    supervised_T = labelled_T
    if prompts:
        chosen = placed.completions[::2]
        supervised_T = labelled_T.copy()
        supervised_T[
            placed.sequence_tokens(chosen.repeat(placed.sequence_lengths[chosen]), _columns(placed, chosen))
        ] = True
        supervised_T &= placed.parents >= 0
    supervised_N = np.flatnonzero(supervised_T)
    sources_U, rows_N = placed.parents[supervised_N], np.arange(len(supervised_N))
    if placed.prefixed:
        sources_U, rows_N = np.unique(sources_U, return_inverse=True)
    batch = Batch(
        {
            "input_ids": torch.from_numpy(ids_T)[None],
            "segments": segments_for(kernel, placed, longest, gathers="completions" in rows[0]),
            "sources": torch.from_numpy(sources_U),
            "source_rows": torch.from_numpy(rows_N),
            "targets": torch.from_numpy(ids_T[supervised_N]),
            "target_documents": torch.from_numpy(placed.document_of[supervised_N]),
        }
    )
    if "completions" not in rows[0]:
        return batch
    number_T = np.full(placed.tokens, -1)
    number_T[supervised_N] = np.arange(len(supervised_N))
    members, completions = _members(placed, placed.completions, np.where(labelled_T, number_T, -1))
    of_pairs = {
        "members": members,
        "member_completions": completions,
        "completion_tokens": np.bincount(completions, minlength=len(placed.completions)),
    }
    if prompts:
        members, pairs = _members(placed, placed.completions[::2], number_T)
        of_pairs |= {"sequence_members": members, "sequence_pairs": pairs}
    return batch | {name: torch.from_numpy(array) for name, array in of_pairs.items()}


def _without_free_tokens(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    used = [int(row["segment_lengths"].sum()) for row in rows]
    # Of a batch that holds nothing, one token is left for the model to compute.
    used[0] = used[0] or int(not any(used))
    return [row | {name: row[name][:tokens] for name in TOKENS} for row, tokens in zip(rows, used) if tokens]


def _members(placed: Layout, segments_C: np.ndarray, number_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which numbered tokens (-1: none) are in the sequences of some segments, in their order; and in which of these."""
    completion_Q = np.repeat(np.arange(len(segments_C)), placed.sequence_lengths[segments_C])
    member_Q = number_T[placed.sequence_tokens(segments_C[completion_Q], _columns(placed, segments_C))]
    found_Q = member_Q >= 0
    return member_Q[found_Q], completion_Q[found_Q]


def _columns(placed: Layout, segments_C: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... of the sequence of each of some segments, laid end to end."""
    lengths_C = placed.sequence_lengths[segments_C]
    return np.arange(lengths_C.sum()) - np.repeat(np.cumsum(lengths_C) - lengths_C, lengths_C)
