"""The `teacher_pass` stage: one part of what `teacher` gathers (`training.reference.teacher_rows`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import TeacherPassSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.training.reference.teacher_rows",
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
    libraries=libraries.FROZEN,
    operation=PASS,
    takes_operation=True,
    # 6 bytes in the result, and as many in the store of rows.
    cost=ModelCost(flops=2, disk_per_stored_token=12),
    group="models",
    array=True,
)
