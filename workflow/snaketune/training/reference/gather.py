"""What the `ref_logps` stage computes: log-probabilities of every pair's completions under the reference model, as one table.

One forward pass over the packed pairs (`training.reference.compute`), in this job or in several whose parts are gathered here.
DPO runs that differ in beta, loss or learning rate share it, and none of them has a reference model in memory.
`training.reference.logps_table` says what its table holds, `training.reference.cache_key` what it is known by.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.packing_support import with_supported_kernel
from snaketune.packing.reader import documents
from snaketune.packing.shards import SPLITS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job import result_at
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec
from snaketune.tables import read_table, write_table
from snaketune.training.reference.cache_key import family
from snaketune.training.reference.compute import compute_logps, stack_of
from snaketune.training.reference.logps_table import FILE, check_finite, in_order, schema, splits_of


def gather_logps(
    spec: RefLogpsSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    tokenizer: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution | None = None,
) -> Outcome:
    """Fill `work.payload` with `logps.arrow`.

    Args:
        model, base_layers, base: the reference, and its base layers if it is an adapter alone; without a model, the base.
        tokenizer: that of the pairs, for a model from outside.
        operation: with the parts' manifests, if there are parts.
    Raises:
        SnaketuneError: a log-probability that isn't finite, or parts that aren't of this reference.
    """
    results = (*model, *base_layers)
    if operation is None or not operation.parts:
        return compute_logps(spec, work, pack, results, tokenizer)
    pattern = Path(operation.parts)
    found = pattern.parent.parent.glob(f"{pattern.parent.name}/{pattern.name}")
    parts = [result_at(path) for path in sorted(found)]
    compute = with_supported_kernel(
        resolve_compute(spec.precision), stack_of(spec, results, tokenizer).config(), dropout=False
    )
    _check_parts(parts, spec, results, pack, operation, compute)
    names = schema(spec.token_logps).names
    tables = [read_table(part.file(FILE)).select(names) for part in parts]
    table = in_order(pa.concat_tables([schema(spec.token_logps).empty_table(), *tables]))
    _check_complete(table, pack, operation.parts)
    check_finite(table, operation.parts)
    write_table(work.payload / FILE, table)
    counts = {split: table["split"].to_pylist().count(split) // 2 for split in SPLITS}
    about = {key: parts[0].manifest[key] for key in ("dtype", "kernel", "weights_dtype", "self_test")}
    return Outcome(counts={"pairs": counts}, about=about, run={"parts": len(parts)})


def _check_parts(
    parts: list[Artifact],
    spec: RefLogpsSpec,
    results: tuple[Artifact, ...],
    pack: Artifact,
    operation: Execution,
    compute: Compute,
) -> None:
    expected: dict[str, Any] = {
        "model": [one.content for one in results],
        "rows": [pack.content],
        "dtype": compute.about()["dtype"],
        "spec": spec.model_dump(mode="json"),
        "kernel": family(compute.kernel),
    }
    if operation.share_kernels:
        del expected["kernel"]
    for part in parts:
        made = part.manifest
        found = {
            "model": made["inputs"]["model"] + made["inputs"]["base_layers"],
            "rows": made["inputs"]["pack"],
            "dtype": made["dtype"],
            "spec": {key: value for key, value in made["spec"].items() if key not in ("part", "parts")},
            "kernel": family(made["kernel"]),
        }
        if differs := [
            f"{key}: {found[key]} there, {value} here" for key, value in expected.items() if found[key] != value
        ]:
            hint = ""
            if [one.partition(":")[0] for one in differs] == ["kernel"]:
                hint = "; `reference_pass.share_kernels: true` takes it as it is"
            raise SnaketuneError(
                f"{part.manifest_path} is no part of this reference ({'; '.join(differs)}){hint}; make it again with: "
                f"{rebuild_command(part.manifest_path)}"
            )


def _check_complete(table: pa.Table, pack: Artifact, parts: str) -> None:
    there = set(zip(table["split"].to_pylist(), table["id"].to_pylist()))
    wanted = {(split, document["id"]) for split in splits_of(pack) for document in documents(pack, split)}
    if missing := sorted(wanted - there):
        raise SnaketuneError(
            f"{parts}: {len(missing)} of {len(wanted)} pairs are in no part, for instance {missing[0][1]}; make the parts again"
        )
