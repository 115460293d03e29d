"""The sequences of packed rows, each computed alone by the model's own attention; and the answers in them.

Nothing here uses the engine's forward passes: a sequence is a batch of its own for `model(input_ids=...)`.
"""

from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from snaketune.engine.packing.segments import layout_of
from snaketune.engine.packing.shards import IGNORED


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """The sequence of one segment, with its prefix.

    Attributes:
        ids, labels: int64[L], of prefix and segment.
        own: the number of leading tokens that are the prefix's, whose loss belongs to other segments.
    """

    ids: np.ndarray
    labels: np.ndarray
    own: int

    @property
    def targets(self) -> np.ndarray:
        """The positions of its own supervised tokens that are predicted from others."""
        positions = np.flatnonzero(self.labels != IGNORED)
        return positions[positions >= max(self.own, 1)]

    def answers(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield its own supervised runs of tokens: those before the run, and the run."""
        targets = self.targets
        for run in np.split(targets, np.flatnonzero(np.diff(targets) > 1) + 1):
            if len(run):
                yield self.ids[: run[0]], self.ids[run[0] : run[-1] + 1]


def documents_of(row: dict[str, Any]) -> list[list[Sequence]]:
    """The sequences of each conversation or text of a row; several if they form a tree."""
    layout = layout_of([row])
    trees: list[list[Sequence]] = [[] for _ in range(int(layout.trees.max(initial=-1)) + 1)]
    for segment, (positions, own) in zip(layout.documents, layout.sequences(), strict=True):
        trees[layout.trees[segment]].append(_sequence(row, positions, own))
    return trees


def completions_of(row: dict[str, Any]) -> list[Sequence]:
    """The sequence of each completion of a row of pairs: chosen, rejected, chosen, ..., all of whose tokens are its own."""
    layout = layout_of([row])
    tokens, offsets = layout.sequences_of(layout.completions)
    return [_sequence(row, positions, 0) for positions in np.split(tokens, offsets[1:-1])]


def _sequence(row: dict[str, Any], positions: np.ndarray, own: int) -> Sequence:
    return Sequence(
        ids=row["input_ids"][positions].astype(np.int64), labels=row["labels"][positions].astype(np.int64), own=own
    )


def random_rows(rows: Sized, count: int) -> list[int]:
    """The numbers of at most `count` rows, the same at every call."""
    return sorted(np.random.default_rng(0).permutation(len(rows))[:count].tolist())


def first_tokens(of: list[Sequence], tokens: int) -> list[Sequence]:
    """The first sequences, so many that they have at most `tokens` tokens, and at least the beginning of one."""
    kept: list[Sequence] = []
    for sequence in of:
        tokens -= len(sequence.ids)
        if tokens < 0 and kept:
            break
        length = len(sequence.ids) + min(tokens, 0)
        kept.append(replace(sequence, ids=sequence.ids[:length], labels=sequence.labels[:length]))
    return kept


def token_losses(
    model: torch.nn.Module, sequence: Sequence, cast: AbstractContextManager[Any] | None = None
) -> torch.Tensor:
    """The negative log-probabilities of a sequence's own supervised tokens, float32[N]. Args: cast: an autocast."""
    targets = torch.from_numpy(sequence.targets)
    with cast or nullcontext():
        logits_LV = logits_of(model, sequence)
    ids_N = torch.from_numpy(sequence.ids[sequence.targets]).to(logits_LV.device)
    return F.cross_entropy(logits_LV[targets.to(logits_LV.device) - 1].float(), ids_N, reduction="none")


def logits_of(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """The logits of a sequence alone, [L, V]."""
    device = next(model.parameters()).device
    return model(input_ids=torch.from_numpy(sequence.ids)[None].to(device), use_cache=False).logits[0]
