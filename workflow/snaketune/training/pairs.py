"""Packed pairs together with their reference log-probabilities."""

from typing import Any, Literal

import torch

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import PackedRows, documents
from snaketune.training.reference import read_ref_logps


class PairRows(PackedRows):
    """Rows of the train split; each also has `reference`, float32[p, 2]: log-probabilities of chosen and rejected."""

    def __init__(self, pack: Artifact, ref_logps: Artifact | None, load_in_memory: Literal["auto"] | bool = "auto"):
        """Args: ref_logps: None where nothing is learned, and time is measured: zeros.

        Raises SnaketuneError if a packed pair has no reference log-probabilities.
        """
        super().__init__(pack, "train", load_in_memory)
        known = read_ref_logps(ref_logps, "train") if ref_logps else {}
        self.references: list[list[tuple[float, float]]] = [[] for _ in range(len(self))]
        for document in documents(pack, "train"):
            if ref_logps is None:
                self.references[document["row"]].append((0.0, 0.0))
                continue
            reference = known.get(document["id"])
            if reference is None:
                raise SnaketuneError(
                    f"{ref_logps.manifest_path} has nothing for pair {document['id']}; rebuild it with: "
                    f"{rebuild_command(ref_logps.manifest_path)}"
                )
            self.references[document["row"]].append((reference.chosen_logp, reference.rejected_logp))
        self.pairs = sum(map(len, self.references))

    def blank(self, tokens: int | None = None) -> dict[str, Any]:
        return super().blank(tokens) | {"reference": torch.empty(0, 2)}

    def __getitem__(self, row: int) -> dict[str, Any]:
        return super().__getitem__(row) | {
            "reference": torch.tensor(self.references[row], dtype=torch.float32).reshape(-1, 2)
        }
