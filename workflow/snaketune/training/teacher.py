"""The `teacher` stage: the most likely tokens of a teacher for each supervised token of a pack, as an artifact
(`training.reference.teacher_rows`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TeacherSpec

STAGE = Stage(
    module=__name__,
    spec=TeacherSpec,
    payload="tokens",
    inputs={
        "pack": exactly_one("pack"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.of_reference,
    operation=(*PASS, "parts"),
    takes_operation=True,
    # 6 bytes in the result, and as many in the store of rows.
    cost=ModelCost(flops=2, disk_per_stored_token=12),
    group="models",
    in_report=True,
)


def build(
    spec: TeacherSpec,
    work: WorkFolder,
    *,
    pack: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution | None = None,
) -> Outcome:
    """Write `train.arrow` and `held_out.arrow` to `work.payload`.

    Args:
        tokenizer: of the rows.
        model, base_layers: the teacher's result, and the base layers of one that is an adapter alone; none if `spec.base` is
            the teacher.
        operation: with the pattern of the parts' manifests, if there are parts.
    """
    from snaketune.training.reference.frozen_model import FrozenModel
    from snaketune.training.reference.teacher_rows import gather_teacher

    results = (*model, *base_layers)
    return gather_teacher(FrozenModel(spec, results, () if results else (tokenizer,)), tokenizer, work, pack, operation)
