"""The `calibrate` stage: measure throughput and memory by micro-batch size on this device, in worker processes
(`training.autotune.calibration`)."""

from pathlib import Path
from typing import TYPE_CHECKING

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import DEVICES, ModelCost, Stage, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CalibrateSpec

if TYPE_CHECKING:
    from snaketune.tracking.curves import TrackedRun

STAGE = Stage(
    module=__name__,
    spec=CalibrateSpec,
    payload="curve",
    inputs={
        "pack": exactly_one("pack", entries=("counts.train.tokens",)),
        "tokenizer": exactly_one("tokenizer"),
    },
    files=("base",),
    libraries=libraries.of_calibration,
    operation=(*DEVICES, "load_in_memory", "micro_batch_rows", "activation_offloading", "calibrated_epochs"),
    launcher="snaketune.training.launch.calibrate_launcher",
    cost=ModelCost(flops=0),
    measures=True,
)


def build(
    spec: CalibrateSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: list[Path],
    tracked: "TrackedRun | None" = None,
) -> Outcome:
    """Write `curve.json` to `work.payload`; see `measure_curve`.

    Args:
        tracked: not used; a calibration isn't tracked.
    """
    from snaketune.training.autotune.calibration import measure_curve

    return measure_curve(spec, work, operation=operation, pack=pack, tokenizer=tokenizer)
