"""Launch `calibrate`, and relaunch it after one of several processes ran out of memory and the others ended with it, or after
the kernel killed one for memory.

Measurements are stored in the work folder, so each launch continues after the trial that ended the previous one.
"""

from snaketune.artifacts.manifest import write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.training.autotune.batch_plan import CURVE, OUT_OF_MEMORY, steps_use_host
from snaketune.training.autotune.search import Trials
from snaketune.training.autotune.time_limit import SHARE, is_too_short
from snaketune.training.launch import processes


def launch(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Launch the stage's processes until one launch finishes; errors as in `processes.launch`. On a CPU, a training too short
    for a trial gets the default without any process."""
    operation = job.operation
    if operation.calibrated_epochs and not (operation.gpus and visible_gpus()):
        manifest = job.artifacts["pack"][0].manifest
        tokens = manifest["counts"]["train"].get("tokens", 0)
        rows = tokens / manifest.get("row_length", 1) * operation.calibrated_epochs / operation.processes
        if is_too_short(rows):
            print(f"not measured: a trial would take more than {SHARE:.0%} of the training", flush=True)
            write_json(work.payload / CURVE, {"device": "cpu", "trials": [], "best": None})
            return Outcome(counts={"trials": 0, "fitting": 0})
    while True:
        (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
        trials = Trials(work.state)
        trials.running.unlink(missing_ok=True)
        before = len(trials)
        try:
            return processes.launch(job, work)
        except SnaketuneError:
            out_of_memory = (work.state / OUT_OF_MEMORY).is_file()
            if out_of_memory and steps_use_host(operation):
                trials.add_killed()
            if not out_of_memory or len(trials) == before:
                raise
