"""Launch `calibrate`, and relaunch it after one of several processes ran out of memory and the others ended with it.

Measurements are stored in the work folder, so each launch continues after the trial that ended the previous one.
"""

from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import OUT_OF_MEMORY
from snaketune.training.autotune.search import Trials
from snaketune.training.launch import processes


def launch(stage: str, *, work: WorkFolder, **job: Any) -> Outcome:
    """Launch the stage's processes until one launch finishes; see `processes.launch` for arguments and errors."""
    while True:
        (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
        before = len(Trials(work.state))
        try:
            return processes.launch(stage, work=work, **job)
        except SnaketuneError:
            if not (work.state / OUT_OF_MEMORY).is_file() or len(Trials(work.state)) == before:
                raise
