"""One attempt of a training: choose its batch plan, and after running out of memory a smaller one for the next attempt."""

from dataclasses import replace

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, choose_plan, out_of_memory_error, record_killed
from snaketune.training.launch import processes
from snaketune.training.launch.memory_kills import why_job_was_killed


def launch(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Choose the batch plan and launch the stage's processes; errors as in `processes.launch`."""
    operation = job.operation
    rows = job.spec.training.batch_rows, operation.processes
    plan = choose_plan(operation, *rows, work.state)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    why = why_job_was_killed(work.state)
    if why:
        record_killed(work.state, why)
        print(
            f"the job of the last attempt was killed: {out_of_memory_error(plan, operation, *rows, work.state)}",
            flush=True,
        )
        plan = choose_plan(operation, *rows, work.state)
    elif why is not None:
        note = "the job of the last attempt was killed (if for memory, lower training.micro_batch_rows)"
        print(f"note: {note}; this one has {plan} again", flush=True)
    try:
        return processes.launch(replace(job, operation=plan.apply_to(operation)), work)
    except SnaketuneError:
        if error := out_of_memory_error(plan, operation, *rows, work.state):
            raise error from None
        raise
