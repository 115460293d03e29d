"""One attempt of a training: choose its batch plan, and after running out of memory a smaller one for the next attempt."""

from typing import Any

from snaketune.config.base import Model
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, choose_plan, out_of_memory_error
from snaketune.training.launch import processes


def launch(stage: str, *, spec: Model, operation: Execution, work: WorkFolder, **job: Any) -> Outcome:
    """Choose the batch plan and launch the stage's processes; arguments and errors as in `processes.launch`."""
    batch_rows, count = spec.training.batch_rows, operation.processes
    plan = choose_plan(operation, batch_rows, count, work.state)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    try:
        return processes.launch(stage, spec=spec, operation=plan.apply_to(operation), work=work, **job)
    except SnaketuneError:
        if error := out_of_memory_error(plan, operation, batch_rows, count, work.state):
            raise error from None
        raise
