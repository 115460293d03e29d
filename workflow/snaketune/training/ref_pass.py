"""The `ref_pass` stage: log-probabilities of one part of the pairs under the reference model (`training.reference.compute`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefPassSpec
from snaketune.training.reference.cache_key import cache_keys

STAGE = Stage(
    module=__name__,
    spec=RefPassSpec,
    payload="logps",
    job_name="{name}/{part}",
    inputs={
        "pack": exactly_one("pack"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
        "tokenizer": any_number("tokenizer"),
    },
    files=("base",),
    libraries=libraries.of_reference,
    operation=PASS,
    cache_keys=cache_keys,
    cost=ModelCost(flops=2),
    group="models",
    array=True,
)


def build(
    spec: RefPassSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    tokenizer: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Write this part's `logps.arrow` to `work.payload`; the inputs are those of `ref_logps`."""
    from snaketune.training.reference.compute import compute_logps
    from snaketune.training.reference.frozen_model import FrozenModel

    return compute_logps(FrozenModel(spec, (*model, *base_layers), tokenizer), work, pack)
