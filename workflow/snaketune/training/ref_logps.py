"""The `ref_logps` stage: log-probabilities of every pair's completions under the reference model, as an artifact
(`training.reference.gather`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec
from snaketune.training.reference.cache_key import DIGESTED_BY, cache_keys

STAGE = Stage(
    module=__name__,
    spec=RefLogpsSpec,
    payload="logps",
    inputs={
        "pack": exactly_one("pack"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
        "tokenizer": any_number("tokenizer"),
    },
    files=("base",),
    libraries=libraries.of_reference,
    operation=(*PASS, "parts"),
    takes_operation=True,
    digested_by=DIGESTED_BY,
    cache_keys=cache_keys,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)


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
    """
    from snaketune.training.reference.frozen_model import FrozenModel
    from snaketune.training.reference.gather import gather_logps

    return gather_logps(FrozenModel(spec, (*model, *base_layers), tokenizer), work, pack, operation)
