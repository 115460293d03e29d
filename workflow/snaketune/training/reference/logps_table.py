"""The table of reference log-probabilities, as DPO and evaluation read it, and the checks that it is complete, finite and
belongs to the right model. Rows are sorted by split (train first), id and completion.

    logps.arrow     id string, split string ("train", "held_out"), completion int8 (0 chosen, 1 rejected),
                    logp float64 (nats, summed over the completion's tokens), tokens int32 (number of these tokens),
                    token_logps list<float32> (nats per token, in order; only if requested)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.kernels import SEPARATE
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table
from snaketune.training.reference.cache_key import kernel_family

FILE = "logps.arrow"
COMPLETIONS = ("chosen", "rejected")
COLUMNS = {"id": pa.string(), "split": pa.string(), "completion": pa.int8(), "logp": pa.float64(), "tokens": pa.int32()}
ORDER = [("split", "descending"), ("id", "ascending"), ("completion", "ascending")]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Reference log-probabilities of the completions of one pair in nats, chosen first; the number of tokens of each; and per
    token, float32[tokens], if they were stored."""

    logps: tuple[float, float]
    tokens: tuple[int, int]
    token_logps: tuple[np.ndarray, np.ndarray] | None = None


def schema(token_logps: bool = False) -> pa.Schema:
    """The columns of `logps.arrow`, with or without `token_logps`."""
    return pa.schema(COLUMNS | ({"token_logps": pa.list_(pa.float32())} if token_logps else {}))


def sort_rows(table: pa.Table) -> pa.Table:
    """Sort rows in the order of `logps.arrow` and drop duplicates."""
    table = table.take(pc.sort_indices(table, ORDER)).combine_chunks()
    if len(table) < 2:
        return table
    same = [np.asarray(pc.equal(table[name].slice(1), table[name].slice(0, len(table) - 1))) for name, _ in ORDER]
    return table.filter(np.concatenate([[True], ~np.logical_and.reduce(same)]))


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
    logps, tokens, per_token = table["logp"].to_pylist(), table["tokens"].to_pylist(), None
    if "token_logps" in table.column_names:
        lists = (row for chunk in table["token_logps"].chunks for row in chunk)
        per_token = [row.values.to_numpy(zero_copy_only=False) for row in lists]
    return {
        pair: Reference(
            logps=tuple(logps[at : at + 2]),
            tokens=tuple(tokens[at : at + 2]),
            token_logps=tuple(per_token[at : at + 2]) if per_token else None,
        )
        for at, pair in zip(range(0, len(table), 2), table["id"].to_pylist()[::2])
    }


def check_finite(table: pa.Table, where: str) -> None:
    """Raise SnaketuneError for the first log-probability that is missing or not finite. Args: where: path for the message."""
    for name in [name for name in ("logp", "token_logps") if name in table.column_names]:
        column = table[name]
        values = pc.list_flatten(column) if name == "token_logps" else column
        if not column.null_count and pc.all(pc.fill_null(pc.is_finite(values), False), min_count=0).as_py():
            continue
        for row in table.to_pylist():
            for value in row[name] if isinstance(row[name], list) else [row[name]]:
                if value is None or not math.isfinite(value):
                    raise SnaketuneError(
                        f"{where}: {name} of the {COMPLETIONS[row['completion']]} completion of pair {row['id']} is {value}; "
                        "expected a finite number"
                    )


def check_computed_alike(
    artifact: Artifact, compute: Compute, *, model: Sequence[Artifact], pairs: str | None, share_kernels: bool
) -> None:
    """Refuse log-probabilities of another model's result, of other pairs, or computed otherwise than here (another machine).
    What the spec says of them is in their cache key (`training.reference.cache_key`).

    Documents that were run separately differ from no kernel: every one has to compute what they compute, and models for which
    none does are found only when they are loaded.

    Args:
        model: the results that the model consists of; empty for an external one.
        pairs: the digest of the pairs, or of the rows, that the artifact counts.
        share_kernels: whether log-probabilities from another attention kernel are accepted.
    Raises:
        SnaketuneError: names what differs, and the command that computes the right ones.
    """
    manifest = artifact.provenance
    inputs, kernel = manifest["inputs"], kernel_family(manifest["kernel"])
    compared = {
        "model": (inputs.get("model", []) + inputs.get("base_layers", []), [result.content for result in model]),
        "pairs": (inputs.get("pack"), [pairs]),
        "dtype": (manifest["dtype"], compute.about()["dtype"]),
    }
    if not (share_kernels or kernel == SEPARATE):
        compared["kernel"] = kernel, kernel_family(compute.kernel)
    if different := [what for what, (there, here) in compared.items() if there != here]:
        differences = "; ".join(f"{what}: {compared[what][0]} there, {compared[what][1]} here" for what in different)
        accepts = "The two kernels agree except for rounding: `reference_pass.share_kernels: true` accepts them. "
        raise SnaketuneError(
            f"{artifact.manifest_path} doesn't belong to this run ({differences}). "
            f"{accepts if different == ['kernel'] else ''}{_rebuild_hint(artifact)}"
        )


def _rebuild_hint(artifact: Artifact) -> str:
    manifest = artifact.provenance
    work_folder = f"results/.work/{manifest.get('stage')}/{manifest.get('fingerprint')}"
    return f"Rebuild it here with: rm -r {work_folder} && {rebuild_command(artifact.manifest_path)}"


def is_comparable(artifact: Artifact, compute: Compute) -> bool:
    """Whether unquantized log-probabilities computed on this machine are comparable with the artifact's; prints why not."""
    manifest, here, quantization = artifact.manifest, compute.about(), artifact.manifest["spec"]["quantization"]
    same_kernel = kernel_family(manifest.get("kernel")) == kernel_family(here["kernel"])
    if manifest.get("dtype") == here["dtype"] and same_kernel and not quantization:
        return True
    print(
        f"{artifact.manifest_path} was computed differently (dtype {manifest.get('dtype')}, kernel {manifest.get('kernel')}, "
        f"quantization {quantization}) from this evaluation (dtype {here['dtype']}, kernel {here['kernel']}); rewards against "
        "it are left out",
        flush=True,
    )
    return False
