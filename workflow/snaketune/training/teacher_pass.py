"""The `teacher_pass` stage: one part of what `teacher` gathers (`training.reference.teacher_rows`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TeacherPassSpec

STAGE = Stage(
    module=__name__,
    spec=TeacherPassSpec,
    payload="tokens",
    job_name="{name}/{part}",
    inputs={
        "pack": exactly_one("pack"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.of_reference,
    operation=PASS,
    # 6 bytes in the result, and as many in the store of rows.
    cost=ModelCost(flops=2, disk_per_stored_token=12),
    group="models",
    array=True,
)


def build(
    spec: TeacherPassSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Write this part's tables to `work.payload`; the inputs are those of `teacher`."""
    from snaketune.training.reference.frozen_model import FrozenModel
    from snaketune.training.reference.teacher_rows import compute_teacher

    results = (*model, *base_layers)
    return compute_teacher(FrozenModel(spec, results, () if results else (tokenizer,)), tokenizer, work, pack)
