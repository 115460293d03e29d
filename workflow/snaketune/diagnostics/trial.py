"""The `trial` stage: a short, timed training in launched processes, whose weights are discarded
(`diagnostics.timed_training`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import TRAINING, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import TrialSpec

if TYPE_CHECKING:
    from snaketune.tracking.curves import TrackedRun

STAGE = Stage(
    module=__name__,
    spec=TrialSpec,
    payload="measured",
    job_name="{name}/{variant}/{repeat}",
    inputs={
        "pack": exactly_one("pack"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft"),
        "base_layers": any_number("sft"),
        "ref_logps": any_number("ref_logps"),
    },
    files=("base",),
    libraries=libraries.of_calibration,
    operation=(*TRAINING, "share_kernels"),
    launcher="snaketune.diagnostics.trial_launcher",
    cost=ModelCost(flops=0),
    measures=True,
)


def build(
    spec: TrialSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: Sequence[Path] = (),
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    ref_logps: Sequence[Artifact] = (),
    tracked: "TrackedRun | None" = None,
) -> Outcome:
    """Fill `work.payload` with `measured.json`; see `time_training`.

    Args:
        tracked: not used, as trials aren't tracked.
    """
    from snaketune.diagnostics.timed_training import time_training

    return time_training(
        spec,
        work,
        operation=operation,
        pack=pack,
        tokenizer=tokenizer,
        model=model,
        base_layers=base_layers,
        ref_logps=ref_logps,
    )
