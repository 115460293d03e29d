"""Start `calibrate` in processes of its own; again where one of several ran out of memory and took the others along.

What was measured is kept in the work folder, so each begins after the trial that ended the one before.
"""

from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY
from snaketune.training.autotune.search import Trials
from snaketune.training.launch import processes


def launch(stage: str, *, work: WorkFolder, **given: Any) -> Outcome:
    """As `training.launch.processes`, which starts the processes."""
    while True:
        (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
        before = len(Trials(work.state))
        try:
            return processes.launch(stage, work=work, **given)
        except SnaketuneError:
            if not (work.state / OUT_OF_MEMORY).is_file() or len(Trials(work.state)) == before:
                raise
