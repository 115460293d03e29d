"""Produce the table of all pairs' log-probabilities under the reference model: the work of the `ref_logps` stage. It is one
forward pass (`training.reference.compute`) in this job, or in several jobs whose parts are gathered here.

DPO runs that differ only in beta, loss or learning rate share the result, and no DPO run loads a reference model.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.engine.model.devices import resolve_compute
from snaketune.engine.model.packing_support import with_supported_kernel
from snaketune.engine.packing.shards import SPLITS
from snaketune.errors import SnaketuneError
from snaketune.packing.reader import documents
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job import result_at
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec
from snaketune.tables import read_table, write_table
from snaketune.training.reference import logps_table as logps
from snaketune.training.reference.compute import build as compute_logps
from snaketune.training.reference.frozen_model import FrozenModel


def build(
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
    """Write `logps.arrow` to `work.payload`.

    Args:
        model, base_layers: the reference's result, and the base layers of one that is an adapter alone.
        tokenizer: tokenizer of the pairs; only for an external reference, which `spec.base` names.
        base: folder of a local base model; unused, as `spec` has its path.
        operation: with the pattern of the parts' manifests, if there are parts.
    Raises:
        SnaketuneError: a log-probability isn't finite, or parts are missing or belong to another reference.
    """
    if operation is None or not operation.parts:
        return compute_logps(spec, work, pack=pack, model=model, base_layers=base_layers, tokenizer=tokenizer)
    parts = parts_of(FrozenModel(spec, (*model, *base_layers), tokenizer), pack, operation)
    columns = logps.schema(spec.token_logps)
    tables = [read_table(part.file(logps.FILE)).select(columns.names) for part in parts]
    table = logps.sort_rows(pa.concat_tables([columns.empty_table(), *tables]))
    computed = set(zip(table["split"].to_pylist(), table["id"].to_pylist()))
    expected = {(split, document["id"]) for split in SPLITS for document in documents(pack, split)}
    if missing := sorted(expected - computed):
        raise SnaketuneError(
            f"{operation.parts}: {len(missing)} of {len(expected)} pairs are in no part, for instance {missing[0][1]}; rebuild "
            "the parts"
        )
    logps.check_finite(table, operation.parts)
    write_table(work.payload / logps.FILE, table)
    counts = {split: table["split"].to_pylist().count(split) // 2 for split in SPLITS}
    about = {key: parts[0].manifest[key] for key in ("dtype", "kernel", "weights_dtype", "self_test")}
    about["rows"] = sorted({key for part in parts for key in part.manifest["rows"]})
    return Outcome(counts={"pairs": counts}, about=about, run={"parts": len(parts)})


def parts_of(model: FrozenModel, pack: Artifact, operation: Execution) -> list[Artifact]:
    """The parts of a model's pass over a pack; SnaketuneError if one belongs to another pass."""
    pattern = Path(operation.parts)
    manifests = pattern.parent.parent.glob(f"{pattern.parent.name}/{pattern.name}")
    parts = [result_at(path) for path in sorted(manifests)]
    compute = with_supported_kernel(resolve_compute(model.spec.precision), model.stack().config(), dropout=False)
    computed = {"model": model.results, "pairs": pack.content, "share_kernels": operation.share_kernels}
    for part in parts:
        logps.check_computed_alike(part, compute, **computed)
    return parts
