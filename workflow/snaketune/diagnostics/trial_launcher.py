"""The launcher of `trial`: worker processes with the batch plan of the run; running out of memory is recorded."""

from typing import Any

from snaketune.artifacts.manifest import write_json
from snaketune.config.operation import Execution
from snaketune.diagnostics.trial_files import MEASURED
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TrialSpec
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY, choose_plan
from snaketune.training.launch import processes


def launch(stage: str, *, spec: TrialSpec, operation: Execution, work: WorkFolder, **inputs: Any) -> Outcome:
    """Launch a trial by `training.launch.processes`; its arguments and result are the same."""
    batch_plan = choose_plan(operation, spec.run.training.batch_rows, operation.processes, work.state)
    (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
    try:
        return processes.launch(stage, spec=spec, operation=batch_plan.apply_to(operation), work=work, **inputs)
    except SnaketuneError as error:
        if not (work.state / OUT_OF_MEMORY).is_file():
            raise
        write_json(work.payload / MEASURED, {"fits": False, "why": f"out of memory with {batch_plan}"})
        print(f"doesn't fit: {error}", flush=True)
        return Outcome(counts={"steps": 0})
