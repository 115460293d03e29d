"""Reference log-probabilities as DPO and evaluation read them: by pair id, complete, finite, and of the right model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.models.devices import Compute
from snaketune.tables import read_table

FILE = "logps.arrow"
# Nats per token by which the same model may differ from itself, in batches of another shape.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def schema() -> pa.Schema:
    """The columns of `logps.arrow`: summed log-probabilities, and the tokens that they are over."""
    return pa.schema(
        [
            ("id", pa.string()),
            ("split", pa.string()),
            ("chosen_logp", pa.float64()),
            ("rejected_logp", pa.float64()),
            ("chosen_tokens", pa.int32()),
            ("rejected_tokens", pa.int32()),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One pair's reference log-probabilities."""

    chosen_logp: float
    rejected_logp: float
    chosen_tokens: int
    rejected_tokens: int
    chosen_token_logps: np.ndarray | None = None
    rejected_token_logps: np.ndarray | None = None


def read_ref_logps(artifact: Artifact, split: str) -> dict[str, Reference]:
    """The split's reference log-probabilities by pair id.

    Raises:
        SnaketuneError: a value is missing or not finite.
    """
    path = artifact.file(FILE)
    columns = read_table(path).to_pydict()
    check_finite(columns, str(path))
    names = ("chosen_logp", "rejected_logp", "chosen_tokens", "rejected_tokens")
    return {
        pair: Reference(**{name: columns[name][i] for name in names})
        for i, pair in enumerate(columns["id"])
        if columns["split"][i] == split
    }


def check_ref_logps(artifact: Artifact, *, model: Sequence[Artifact], pack: Artifact, compute: Compute) -> None:
    """Refuse reference log-probabilities that were made by another model, on other pairs, or computed otherwise.

    Raises:
        SnaketuneError: with what differs, and how to make the right ones.
    """
    made_from = artifact.manifest["inputs"]
    differs = [
        f"{what}: {found} there, {expected} here"
        for what, found, expected in (
            (
                "model",
                made_from.get("model", []) + made_from.get("beneath", []),
                [one.content for one in model],
            ),
            ("pairs", made_from.get("pack"), [pack.content]),
            *((name, artifact.manifest.get(name), used) for name, used in compute.about().items()),
        )
        if found != expected
    ]
    if differs:
        kept = f"results/.work/ref_logps/{artifact.manifest.get('fingerprint')}"
        raise SnaketuneError(
            f"{artifact.manifest_path} doesn't belong to this run ({'; '.join(differs)}). Make it here with: "
            f"rm -r {kept} && {rebuild_command(artifact.manifest_path)}"
        )


def check_policy_is_reference(
    trained_P2: torch.Tensor, evaluated_P2: torch.Tensor, counts_P2: torch.Tensor, dtype: torch.dtype
) -> None:
    """Before the first step the policy is the reference, so all log-ratios are zero and the sigmoid loss is log 2.

    Args:
        trained_P2, evaluated_P2: float32[P, 2], summed log-ratios of the same pairs in training and in evaluation mode. The
            two are the same computation, so they may differ by less than batches of another shape do.
        counts_P2: int64[P, 2], their tokens.
        dtype: the data type of the computation.
    Raises:
        SnaketuneError: they aren't zero, or not the same.
    """
    for from_what, ratios_P2, rounding in (
        ("from its own reference log-probabilities", trained_P2, ROUNDING[dtype]),
        ("in training from itself in evaluation", trained_P2 - evaluated_P2, ROUNDING[dtype] / 10),
    ):
        worst = (ratios_P2 / counts_P2.clamp(min=1)).abs().max().item() if len(ratios_P2) else 0.0
        if not worst <= rounding:
            raise SnaketuneError(
                f"before the first step the model differs {from_what} by {worst:.2g} nats per token (at most {rounding:g} is "
                "rounding): DPO would learn that difference. Nothing was trained; take a model without noise in training, "
                "and if it has none, make the reference again"
            )


def is_comparable(artifact: Artifact, compute: Compute) -> bool:
    """Whether log-probabilities computed here, without quantization, can be set against the artifact's; says so if not."""
    made = artifact.manifest
    same = all(made.get(name) == used for name, used in compute.about().items()) and not made["spec"]["quantization"]
    if not same:
        print(
            f"{artifact.manifest_path} was computed otherwise (dtype {made.get('dtype')}, kernel {made.get('kernel')}, "
            f"quantization {made['spec']['quantization']}); rewards against it are left out",
            flush=True,
        )
    return same


def check_finite(columns: dict[str, list[Any]], where: str) -> None:
    """Raise SnaketuneError at the first log-probability that is missing or not finite."""
    for name in ("chosen_logp", "rejected_logp"):
        for pair, value in zip(columns["id"], columns[name], strict=True):
            if value is None or not math.isfinite(value):
                raise SnaketuneError(f"{where}: {name} of pair {pair} is {value}; expected a finite number")
