"""The `calibrate` stage: measure throughput and memory by micro-batch size on this device, in worker processes
(`training.autotune.calibration`)."""

from typing import TYPE_CHECKING

from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import DEVICES, ModelCost, Stage, exactly_one
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CalibrateSpec

if TYPE_CHECKING:
    from snaketune.stages.loaded_job import LoadedJob

STAGE = Stage(
    module=__name__,
    work="snaketune.training.autotune.calibration",
    spec=CalibrateSpec,
    payload="curve",
    inputs={
        "pack": exactly_one("pack", entries=("counts.train.tokens",)),
        "tokenizer": exactly_one("tokenizer"),
    },
    files=("base",),
    libraries=libraries.TRAINING,
    operation=(*DEVICES, "load_in_memory", "activation_offloading", "calibrated_epochs"),
    launcher=__name__,
    cost=ModelCost(flops=0),
    measures=True,
)


def launch(job: "LoadedJob", work: WorkFolder) -> Outcome:
    """Launch `build` in processes, and again after one of several ran out of memory and the others ended with it, or after the
    kernel killed one for memory: each launch continues after the trial that ended the previous one. Errors as in
    `processes.launch`. On a CPU, a training too short for a trial gets the default without any process."""
    from snaketune.training.autotune.batch_plan import CURVE, OUT_OF_MEMORY
    from snaketune.training.autotune.search import SHARE, TRIALS, is_too_short, read_trials
    from snaketune.training.launch import processes

    operation = job.operation
    if operation.calibrated_epochs and not (operation.gpus and visible_gpus()):
        manifest = job.artifacts["pack"][0].manifest
        rows = manifest["counts"]["train"].get("tokens", 0) / manifest.get("row_length", 1)
        if is_too_short(rows * operation.calibrated_epochs / operation.processes):
            print(f"not measured: a trial would take more than {SHARE:.0%} of the training", flush=True)
            write_json(work.payload / CURVE, {"device": "cpu", "trials": [], "best": None})
            return Outcome(counts={"trials": 0, "fitting": 0})
    (work.state / TRIALS).unlink(missing_ok=True)
    while True:
        before = len(read_trials(work.state))
        (work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
        try:
            return processes.launch(job, work)
        except SnaketuneError:
            if not (work.state / OUT_OF_MEMORY).is_file() or len(read_trials(work.state)) == before:
                raise
