"""The `timing` stage: a short, timed training in launched processes, whose weights are discarded."""

from dataclasses import replace
from typing import TYPE_CHECKING

from snaketune.diagnostics.settings import MEASURED
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import TRAINING, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TimingSpec

if TYPE_CHECKING:
    from snaketune.stages.loaded_job import LoadedJob


STAGE = Stage(
    module=__name__,
    work="snaketune.diagnostics.timed_training",
    spec=TimingSpec,
    payload="measured",
    job_name="{name}/{variant}/{repeat}",
    inputs={
        "pack": exactly_one("pack"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
        "ref_logps": any_number("ref_logps"),
        "reference": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.TRAINING,
    operation=(*TRAINING, "share_kernels"),
    launcher=__name__,
    cost=ModelCost(flops=0),
    measures=True,
)


def launch(job: "LoadedJob", work: WorkFolder) -> Outcome:
    """Run `build` as `processes.launch` does, with the batch plan of the run; running out of memory is recorded."""
    from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, choose_plan
    from snaketune.training.launch import processes

    operation = job.operation
    batch_plan = choose_plan(operation, job.spec.run.training.batch_rows, operation.processes, work.state)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    try:
        return processes.launch(replace(job, operation=batch_plan.apply_to(operation)), work)
    except SnaketuneError as error:
        if not (work.state / OUT_OF_MEMORY).is_file():
            raise
        write_json(work.payload / MEASURED, {"fits": False, "why": f"out of memory with {batch_plan}"})
        print(f"doesn't fit: {error}", flush=True)
        return Outcome(counts={"steps": 0})
