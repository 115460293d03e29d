"""The training dataset of preference trainings: packed pairs, or single completions packed like pairs, with their reference
log-probabilities, sources and labels."""

from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import PackedRows, documents
from snaketune.training.reference.logps_table import Reference, read_ref_logps


class PairRows(PackedRows):
    """Packed rows of a split with columns per pair: `reference`, float32[p, 2], the reference log-probabilities of
    chosen and rejected; `source`, int64[p], the index of the pair's source in the corpus; and for single completions
    `desirable`, bool[p].

    Attributes:
        pairs, sources: number of pairs; 1 + the highest index of a source that a pair comes from.
        distinct_labels: the labels that occur among single completions; empty for pairs.
    """

    def __init__(
        self,
        pack: Artifact,
        ref_logps: Artifact | None,
        load_in_memory: Literal["auto"] | bool = "auto",
        ld_alpha: float | None = None,
        split: str = "train",
    ):
        """
        Args:
            ref_logps: None for a loss without a reference and for timed trials, which get zeros.
            ld_alpha: weight of the tokens beyond the length of the pair's other completion; None for no weighting.
        Raises:
            SnaketuneError: a packed pair has no reference log-probabilities, or none per token although `ld_alpha` is set.
        """
        super().__init__(pack, split, load_in_memory)
        self.unpaired = pack.manifest.get("kind") == "unpaired"
        known = read_ref_logps(ref_logps, split) if ref_logps else {}
        # Log-probabilities, source and label of each row's pairs.
        self.of_rows: list[list[tuple[tuple[float, float], int, bool]]] = [[] for _ in range(len(self))]
        for pair in documents(pack, split):
            logps = _logps(ref_logps, known.get(pair["id"]), pair["id"], ld_alpha) if ref_logps else (0.0, 0.0)
            self.of_rows[pair["row"]].append((logps, pair["source"], pair.get("label", False)))
        every = list(chain.from_iterable(self.of_rows))
        self.pairs = len(every)
        self.distinct_labels = {label for _, _, label in every} if self.unpaired else set()
        self.sources = 1 + max((source for _, source, _ in every), default=0)

    def blank(self, tokens: int | None = None) -> dict[str, Any]:
        return super().blank(tokens) | self._pair_columns([])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row) | self._pair_columns(self.of_rows[row])

    def _pair_columns(self, pairs: list[tuple[tuple[float, float], int, bool]]) -> dict[str, torch.Tensor]:
        references, sources, labels = zip(*pairs) if pairs else ((), (), ())
        columns = {
            "reference": torch.tensor(references, dtype=torch.float32).reshape(-1, 2),
            "source": torch.tensor(sources, dtype=torch.int64),
        }
        return columns | ({"desirable": torch.tensor(labels, dtype=torch.bool)} if self.unpaired else {})


def _logps(artifact: Artifact, reference: Reference | None, pair: str, ld_alpha: float | None) -> tuple[float, float]:
    per_token = reference is not None and reference.token_logps is None and ld_alpha is not None
    if reference is None or per_token:
        lacks = "per token, which dpo.ld_alpha needs" if per_token else f"for pair {pair}"
        raise SnaketuneError(
            f"{artifact.manifest_path} has no log-probabilities {lacks}; rebuild it with: "
            f"{rebuild_command(artifact.manifest_path)}"
        )
    return weighted_logps(reference, ld_alpha)


def weighted_logps(reference: Reference, ld_alpha: float | None) -> tuple[float, float]:
    """Reference log-probabilities of the chosen and the rejected completion, with the same `ld_alpha` weights as the policy's.

    >>> known = Reference(logps=(-6.0, -1.0), tokens=(3, 1),
    ...                   token_logps=(np.array([-1.0, -2.0, -3.0]), np.array([-1.0])))
    >>> weighted_logps(known, None), weighted_logps(known, 0.5)
    ((-6.0, -1.0), (-3.5, -1.0))
    """
    if ld_alpha is None:
        return reference.logps
    shared = min(reference.tokens)
    chosen, rejected = (
        float(logps[:shared].sum(dtype=np.float64) + ld_alpha * logps[shared:].sum(dtype=np.float64))
        for logps in reference.token_logps
    )
    return chosen, rejected
