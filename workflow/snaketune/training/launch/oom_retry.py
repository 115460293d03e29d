"""One attempt of a training: choose its batch plan, and after running out of memory a smaller one for the next attempt."""

from dataclasses import replace

from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import (
    OUT_OF_MEMORY,
    BatchPlan,
    choose_plan,
    out_of_memory_error,
    save_plan,
    smaller_plan,
    steps_use_host,
    takes_steps,
)
from snaketune.training.launch import processes
from snaketune.training.launch.memory_kills import why_job_was_killed


def launch(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Choose the batch plan and launch the stage's processes; errors as in `processes.launch`."""
    operation = job.operation
    batch_rows, count = job.spec.training.batch_rows, operation.processes
    plan = _after_killed_job(choose_plan(operation, batch_rows, count, work.state), operation, batch_rows, work)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    try:
        return processes.launch(replace(job, operation=plan.apply_to(operation)), work)
    except SnaketuneError:
        if error := out_of_memory_error(plan, operation, batch_rows, count, work.state):
            raise error from None
        raise


def _after_killed_job(plan: BatchPlan, operation: Execution, batch_rows: int, work: WorkFolder) -> BatchPlan:
    """Return the plan, or a smaller one and say so if the last attempt's job was killed as a whole, for memory, in a step."""
    why = why_job_was_killed(work.state)
    if why is None:
        return plan
    smaller = smaller_plan(plan, operation, batch_rows, operation.processes)
    if why and smaller and takes_steps(work.state) and steps_use_host(operation):
        print(
            f"the job of the last attempt was killed for memory ({why}) with {plan}; this one has {smaller}", flush=True
        )
        save_plan(work.state, operation, smaller)
        return smaller
    cause = f"for memory ({why})" if why else "(if for memory, lower training.micro_batch_rows)"
    print(f"note: the job of the last attempt was killed {cause}; this one has {plan} again", flush=True)
    return plan
