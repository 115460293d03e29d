"""The table of reference log-probabilities, as DPO and evaluation read it, and the checks that it is complete, finite and
belongs to the right model.

    logps.arrow     id string, split string ("train", "held_out"), completion int8 (0 chosen, 1 rejected),
                    logp float64 (nats, summed over the completion's tokens), tokens int32 (number of these tokens),
                    token_logps list<float32> (nats per token, in order; only if requested)

Rows are sorted by split (train first), id and completion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.models.devices import Compute
from snaketune.packing.shards import SPLITS
from snaketune.stages.specs import DpoSpec
from snaketune.tables import read_table
from snaketune.training.reference.cache_key import kernel_family, path_and_revision

FILE = "logps.arrow"
COMPLETIONS = ("chosen", "rejected")
# Tolerances for the same model in batches of other shapes, in nats per token: the mean over completions may differ by ROUNDING,
# a single completion by OUTLIER times as much. In float32 that is ROUNDING for every completion.
OUTLIER = {torch.float32: 1, torch.bfloat16: 10, torch.float16: 10}
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def schema(token_logps: bool = False) -> pa.Schema:
    """The columns of `logps.arrow`, with or without `token_logps`."""
    return pa.schema(
        [
            ("id", pa.string()),
            ("split", pa.string()),
            ("completion", pa.int8()),
            ("logp", pa.float64()),
            ("tokens", pa.int32()),
            *([("token_logps", pa.list_(pa.float32()))] if token_logps else []),
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Reference log-probabilities of one pair in nats, and per token, float32[tokens], if they were stored."""

    chosen_logp: float
    rejected_logp: float
    chosen_tokens: int
    rejected_tokens: int
    chosen_token_logps: np.ndarray | None = None
    rejected_token_logps: np.ndarray | None = None


def sort_rows(table: pa.Table) -> pa.Table:
    """Sort rows in the order of `logps.arrow` and drop duplicates."""
    keys = [("split", "descending"), ("id", "ascending"), ("completion", "ascending")]
    table = table.take(pc.sort_indices(table, keys)).combine_chunks()
    if len(table) < 2:
        return table
    same = [pc.equal(table[name].slice(1), table[name].slice(0, len(table) - 1)) for name, _ in keys]
    duplicate = np.logical_and.reduce([np.asarray(one) for one in same])
    return table.filter(np.concatenate([[True], ~duplicate]))


def reference_splits(pack: Artifact) -> tuple[str, ...]:
    """The splits that need reference log-probabilities: evaluations use pairs only, so single completions need no held-out
    split."""
    return ("train",) if pack.manifest.get("kind") == "unpaired" else SPLITS


def read_ref_logps(artifact: Artifact, split: str) -> dict[str, Reference]:
    """The split's reference log-probabilities by pair id.

    Raises:
        SnaketuneError: a value is missing or not finite.
    """
    path = artifact.file(FILE)
    table = read_table(path)
    check_finite(table, str(path))
    table = table.filter(pc.equal(table["split"], split)).combine_chunks()
    if table["completion"].to_pylist() != [0, 1] * (len(table) // 2):
        raise SnaketuneError(f"{path}: a pair has other than two completions; {_rebuild_hint(artifact)}")
    logps, tokens = table["logp"].to_pylist(), table["tokens"].to_pylist()
    token_logps = _lists(table["token_logps"]) if "token_logps" in table.column_names else [None] * len(table)
    return {
        pair: Reference(
            chosen_logp=logps[at],
            rejected_logp=logps[at + 1],
            chosen_tokens=tokens[at],
            rejected_tokens=tokens[at + 1],
            chosen_token_logps=token_logps[at],
            rejected_token_logps=token_logps[at + 1],
        )
        for at, pair in zip(range(0, len(table), 2), table["id"].to_pylist()[::2])
    }


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [row.values.to_numpy(zero_copy_only=False) for chunk in column.chunks for row in chunk]


def check_ref_logps(
    artifact: Artifact,
    spec: DpoSpec,
    *,
    model: Sequence[Artifact],
    pack: Artifact,
    compute: Compute,
    share_kernels: bool,
) -> None:
    """Refuse reference log-probabilities of another model, of other pairs, or from another computation: exactly those with
    another cache key (`training.reference.cache_key`).

    Args:
        share_kernels: whether log-probabilities from another attention kernel are accepted.
    Raises:
        SnaketuneError: names what differs, and the command that computes the right ones.
    """
    manifest, inputs = artifact.manifest, artifact.manifest["inputs"]
    made_spec = manifest["spec"]
    external, outside = spec.reference, not inputs.get("model")
    # The data type in which the reference is loaded: an external one isn't quantized and has no float32 master weights.
    weights = compute.weights_dtype(frozen=external is not None or spec.lora is not None)
    expected = {
        "model": (
            [] if external else [one.content for one in model],
            inputs.get("model", []) + inputs.get("base_layers", []),
        ),
        "pairs": ([pack.manifest.get("pairs")], inputs.get("pack")),
        "dtype": (compute.about()["dtype"], manifest.get("dtype")),
        "weights_dtype": (str(weights).removeprefix("torch."), manifest.get("weights_dtype")),
        "kernel": (kernel_family(compute.kernel), kernel_family(manifest.get("kernel"))),
        "quantization": (
            None if external or not spec.quantization else spec.quantization.model_dump(mode="json"),
            made_spec["quantization"],
        ),
        "adapter unmerged": (spec.continued and not external, made_spec.get("apart", False)),
        "reference": (path_and_revision(external), path_and_revision(made_spec["base"]) if outside else None),
    }
    if outside and external and Path(external.path).is_dir():
        # A local folder is identified by its content, not by its path.
        del expected["reference"]
    if share_kernels:
        del expected["kernel"]
    differences = [f"{what}: {there} there, {here} here" for what, (here, there) in expected.items() if there != here]
    if not differences:
        return
    hint = ""
    if [one.partition(":")[0] for one in differences] == ["kernel"]:
        hint = "The two kernels agree except for rounding: `reference_pass.share_kernels: true` accepts them. "
    raise SnaketuneError(
        f"{artifact.manifest_path} doesn't belong to this run ({'; '.join(differences)}). {hint}{_rebuild_hint(artifact)}"
    )


def _rebuild_hint(artifact: Artifact) -> str:
    work_folder = f"results/.work/ref_logps/{artifact.manifest.get('fingerprint')}"
    return f"Rebuild it here with: rm -r {work_folder} && {rebuild_command(artifact.manifest_path)}"


def check_policy_is_reference(
    trained_P2: torch.Tensor,
    evaluated_P2: torch.Tensor,
    counts_P2: torch.Tensor,
    dtype: torch.dtype,
    *,
    external: bool = False,
) -> None:
    """Check before the first step that the policy equals its reference: log-ratios are zero, so the sigmoid loss is log 2.

    Args:
        trained_P2, evaluated_P2: float32[P, 2], summed log-ratios of the same pairs in training and in evaluation mode. The
            two computations have the same shapes, so they may differ by a tenth of ROUNDING only.
        counts_P2: int64[P, 2], tokens per completion.
        dtype: data type of the computation.
        external: whether the reference is another model; then only training and evaluation mode are compared.
    Raises:
        SnaketuneError: log-ratios aren't zero, or differ between training and evaluation mode.
    """
    for from_what, ratios_P2, rounding in (
        *([] if external else [("from its own reference log-probabilities", trained_P2, ROUNDING[dtype])]),
        ("in training from itself in evaluation", trained_P2 - evaluated_P2, ROUNDING[dtype] / 10),
    ):
        if not len(ratios_P2):
            continue
        per_token_P2 = (ratios_P2 / counts_P2.clamp(min=1)).abs()
        mean, worst = per_token_P2.mean().item(), per_token_P2.max().item()
        if not (worst <= OUTLIER[dtype] * rounding and mean <= rounding):
            raise SnaketuneError(
                f"before the first step the model differs {from_what} by {mean:.2g} nats per token on average over a batch's "
                f"completions, and by {worst:.2g} at most ({rounding:g} is rounding): DPO would learn that difference. "
                "Nothing was trained. Use a model without noise in training (dropout, router jitter); if it has none, rebuild "
                "the reference log-probabilities"
            )


def is_comparable(artifact: Artifact, compute: Compute) -> bool:
    """Whether unquantized log-probabilities computed on this machine are comparable with the artifact's; prints why not."""
    made = artifact.manifest
    here = compute.about()
    alike = made.get("dtype") == here["dtype"] and kernel_family(made.get("kernel")) == kernel_family(here["kernel"])
    same = alike and not made["spec"]["quantization"]
    if not same:
        print(
            f"{artifact.manifest_path} was computed differently (dtype {made.get('dtype')}, kernel {made.get('kernel')}, "
            f"quantization {made['spec']['quantization']}) from this evaluation (dtype {here['dtype']}, kernel "
            f"{here['kernel']}); rewards against it are left out",
            flush=True,
        )
    return same


def check_finite(table: pa.Table, where: str) -> None:
    """Raise SnaketuneError for the first log-probability that is missing or not finite. Args: where: path for the message."""
    names = [name for name in ("logp", "token_logps") if name in table.column_names]
    for name in names:
        column = table[name] if name == "logp" else pc.list_flatten(table[name])
        if pc.all(pc.fill_null(pc.is_finite(column), False)).as_py() is not False and not table[name].null_count:
            continue
        for row in table.to_pylist():
            values = row[name] if name != "logp" else [row[name]]
            for value in values if values is not None else [None]:
                if value is None or not math.isfinite(value):
                    raise SnaketuneError(
                        f"{where}: {name} of the {COMPLETIONS[row['completion']]} completion of pair {row['id']} is {value}; "
                        "expected a finite number"
                    )
