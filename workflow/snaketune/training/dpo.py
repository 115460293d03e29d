"""The `dpo` stage: preference optimization on packed pairs, in worker processes.

The prompt of a pair is computed once for both completions. Reference log-probabilities, if the loss needs them, are read from
their artifact, so no reference model is in memory. `engine.preference_losses` defines the loss of a step,
`engine.dpo` trains.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import TRAINING, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec

if TYPE_CHECKING:
    from snaketune.tracking.curves import TrackedRun

STAGE = Stage(
    module=__name__,
    spec=DpoSpec,
    payload="model",
    inputs={
        "model": exactly_one("sft", "dpo"),
        "pack": exactly_one("pack"),
        "base_layers": any_number("sft", "dpo"),
        "ref_logps": any_number("ref_logps"),
        "reference": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.TRAINING,
    operation=(*TRAINING, "share_kernels"),
    launcher="snaketune.training.launch.oom_retry",
    cost=ModelCost(flops=6, disk_per_parameter=4),
    group="models",
    in_report=True,
)


def build(
    spec: DpoSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    pack: Artifact,
    ref_logps: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    reference: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    tracked: "TrackedRun | None" = None,
) -> Outcome:
    """Write a model folder to `work.payload`: weights or an adapter, config and tokenizer.

    Args:
        ref_logps: one artifact, or none for a loss without a reference.
        base_layers, base: the results and the base that `model` is applied to, if it is only an adapter.
        reference: the results that the reference consists of, if it is another one than the model that this run starts from.
    """
    from snaketune.training.launch.worker import is_main_process
    from snaketune.training.pipeline import train
    from snaketune.training.prepared import TrainingRun
    from snaketune.training.prepared_dpo import prepare_dpo
    from snaketune.training.save_model import copy_other_files

    for result in (model, *base_layers):
        result.files()
    run = TrainingRun.of(spec, operation, work, tracked)
    outcome = train(prepare_dpo(run, (model, *base_layers), pack, *ref_logps, reference=reference))
    if is_main_process():
        copy_other_files(model, work.payload)
    return outcome
