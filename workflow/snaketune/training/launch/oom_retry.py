"""One attempt of a training: in portions that are chosen before its processes start, lower ones after memory ran out."""

from typing import Any

from snaketune.config.base import Model
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, choose_plan, out_of_memory_error
from snaketune.training.launch import processes


def launch(stage: str, *, spec: Model, operation: Execution, work: WorkFolder, **inputs: Any) -> Outcome:
    """As `training.launch.processes`, which starts the processes.

    Raises:
        SnaketuneError: as there; or memory ran out, and the next attempt takes lower portions.
    """
    batch_rows, count = spec.training.batch_rows, operation.processes
    portions = choose_plan(operation, batch_rows, count, work.state)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    try:
        return processes.launch(stage, spec=spec, operation=portions.apply_to(operation), work=work, **inputs)
    except SnaketuneError:
        if error := out_of_memory_error(portions, operation, batch_rows, count, work.state):
            raise error from None
        raise
