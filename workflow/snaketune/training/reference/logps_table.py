"""Reference log-probabilities as DPO and evaluation read them: by pair id, complete, finite, and of the right model.

    logps.arrow     id string, split string ("train", "held_out"), completion int8 (0 chosen, 1 rejected),
                    logp float64 (nats, summed over the completion's tokens), tokens int32 (how many these are),
                    and where it was asked for token_logps list<float32> (each token's, in their order)

Sorted by split (train first), id and completion.
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
from snaketune.training.reference.cache_key import family, named

FILE = "logps.arrow"
COMPLETIONS = ("chosen", "rejected")
# Nats per token by which the same model may differ from itself, in batches of another shape: in float32 in every completion, in
# 16 bits in the mean of them, and in none by OUTLIER times as much.
OUTLIER = {torch.float32: 1, torch.bfloat16: 10, torch.float16: 10}
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def schema(token_logps: bool = False) -> pa.Schema:
    """The columns of `logps.arrow`."""
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
    """One pair's reference log-probabilities; those of single tokens, float32[tokens], where they were kept."""

    chosen_logp: float
    rejected_logp: float
    chosen_tokens: int
    rejected_tokens: int
    chosen_token_logps: np.ndarray | None = None
    rejected_token_logps: np.ndarray | None = None


def in_order(table: pa.Table) -> pa.Table:
    """As `logps.arrow` has them: sorted, and what is there twice once."""
    keys = [("split", "descending"), ("id", "ascending"), ("completion", "ascending")]
    table = table.take(pc.sort_indices(table, keys)).combine_chunks()
    if len(table) < 2:
        return table
    same = [pc.equal(table[name].slice(1), table[name].slice(0, len(table) - 1)) for name, _ in keys]
    again = np.logical_and.reduce([np.asarray(one) for one in same])
    return table.filter(np.concatenate([[True], ~again]))


def splits_of(pack: Artifact) -> tuple[str, ...]:
    """Those that anybody asks about: evaluations are of pairs, so of single completions none that is held out."""
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
        raise SnaketuneError(f"{path}: a pair has other than two completions; {_again(artifact)}")
    logps, tokens = table["logp"].to_pylist(), table["tokens"].to_pylist()
    kept = _lists(table["token_logps"]) if "token_logps" in table.column_names else [None] * len(table)
    return {
        pair: Reference(
            chosen_logp=logps[at],
            rejected_logp=logps[at + 1],
            chosen_tokens=tokens[at],
            rejected_tokens=tokens[at + 1],
            chosen_token_logps=kept[at],
            rejected_token_logps=kept[at + 1],
        )
        for at, pair in zip(range(0, len(table), 2), table["id"].to_pylist()[::2])
    }


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [row.values.to_numpy(zero_copy_only=False) for chunk in column.chunks for row in chunk]


def check_ref_logps(
    artifact: Artifact, spec: DpoSpec, *, model: Sequence[Artifact], pack: Artifact, compute: Compute, any_kernel: bool
) -> None:
    """Refuse reference log-probabilities that were made by another model, on other pairs, or computed otherwise: all that has
    another key (`training.reference.cache_key`), and nothing that has the same.

    Args:
        any_kernel: whether those of another attention kernel are taken.
    Raises:
        SnaketuneError: with what differs, and how to make the right ones.
    """
    made, about = artifact.manifest, artifact.manifest["inputs"]
    told = made["spec"]
    external, outside = spec.reference, not about.get("model")
    # As the reference is loaded (`training.reference.cache_key`): an external one isn't quantized, nor has it masters.
    weights = compute.weights_dtype(frozen=external is not None or spec.lora is not None)
    expected = {
        "model": (
            [] if external else [one.content for one in model],
            about.get("model", []) + about.get("base_layers", []),
        ),
        "pairs": ([pack.manifest.get("pairs")], about.get("pack")),
        "dtype": (compute.about()["dtype"], made.get("dtype")),
        "weights_dtype": (str(weights).removeprefix("torch."), made.get("weights_dtype")),
        "kernel": (family(compute.kernel), family(made.get("kernel"))),
        "quantization": (
            None if external or not spec.quantization else spec.quantization.model_dump(mode="json"),
            told["quantization"],
        ),
        "adapter apart": (spec.continued and not external, told.get("apart", False)),
        "reference": (named(external), named(told["base"]) if outside else None),
    }
    if outside and external and Path(external.path).is_dir():
        # Known by its content, wherever it lies.
        del expected["reference"]
    if any_kernel:
        del expected["kernel"]
    differs = [f"{what}: {found} there, {here} here" for what, (here, found) in expected.items() if found != here]
    if not differs:
        return
    hint = ""
    if [one.partition(":")[0] for one in differs] == ["kernel"]:
        hint = "The two agree to rounding: `reference_pass.share_kernels: true` takes them as they are. "
    raise SnaketuneError(
        f"{artifact.manifest_path} doesn't belong to this run ({'; '.join(differs)}). {hint}{_again(artifact)}"
    )


def _again(artifact: Artifact) -> str:
    kept = f"results/.work/ref_logps/{artifact.manifest.get('fingerprint')}"
    return f"Make it here with: rm -r {kept} && {rebuild_command(artifact.manifest_path)}"


def check_policy_is_reference(
    trained_P2: torch.Tensor,
    evaluated_P2: torch.Tensor,
    counts_P2: torch.Tensor,
    dtype: torch.dtype,
    *,
    external: bool = False,
) -> None:
    """Before the first step the policy is the reference, so all log-ratios are zero and the sigmoid loss is log 2.

    Args:
        trained_P2, evaluated_P2: float32[P, 2], summed log-ratios of the same pairs in training and in evaluation mode. The
            two are the same computation, so they may differ by less than batches of another shape do.
        counts_P2: int64[P, 2], their tokens.
        dtype: the data type of the computation.
        external: whether the reference is another model, from which the policy may differ as it likes.
    Raises:
        SnaketuneError: they aren't zero, or not the same.
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
                f"before the first step the model differs {from_what} by {mean:.2g} nats per token in the mean of a batch's "
                f"completions, and by {worst:.2g} at most ({rounding:g} is rounding): DPO would learn that difference. "
                "Nothing was trained; take a model without noise in training, and if it has none, make the reference again"
            )


def is_comparable(artifact: Artifact, compute: Compute) -> bool:
    """Whether log-probabilities computed here, without quantization, can be set against the artifact's; says so if not."""
    made = artifact.manifest
    here = compute.about()
    alike = made.get("dtype") == here["dtype"] and family(made.get("kernel")) == family(here["kernel"])
    same = alike and not made["spec"]["quantization"]
    if not same:
        print(
            f"{artifact.manifest_path} was computed otherwise (dtype {made.get('dtype')}, kernel {made.get('kernel')}, "
            f"quantization {made['spec']['quantization']}); rewards against it are left out",
            flush=True,
        )
    return same


def check_finite(table: pa.Table, where: str) -> None:
    """Raise SnaketuneError at the first log-probability that is missing or not finite."""
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
