"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model, in worker processes
(`engine.sft`)."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import TRAINING, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec

if TYPE_CHECKING:
    from snaketune.tracking.curves import TrackedRun

STAGE = Stage(
    module=__name__,
    spec=SftSpec,
    payload="model",
    inputs={
        "pack": exactly_one("pack"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft"),
        "base_layers": any_number("sft"),
        "teacher": any_number("teacher"),
    },
    files=("base",),
    libraries=libraries.TRAINING,
    operation=TRAINING,
    launcher="snaketune.training.launch.oom_retry",
    cost=ModelCost(flops=6, disk_per_parameter=4),
    group="models",
    in_report=True,
)


def build(
    spec: SftSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: list[Path],
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    teacher: Sequence[Artifact] = (),
    tracked: "TrackedRun | None" = None,
) -> Outcome:
    """Write a model folder to `work.payload`: weights or an adapter, config and tokenizer.

    Args:
        base: the folder of the base model, if the training starts from a local one.
        model, base_layers: the result that the training starts from, and the results that its adapters are applied to.
        teacher: a teacher's tokens for the rows, if the spec has `distill`.
    """
    from snaketune.training.launch.worker import is_main_process
    from snaketune.training.pipeline import train
    from snaketune.training.prepared import TrainingRun
    from snaketune.training.prepared_sft import prepare_sft
    from snaketune.training.save_model import warn_if_tokenizer_differs

    tokenizer.files()
    for result in (*model, *base_layers):
        result.files()
    run = TrainingRun.of(spec, operation, work, tracked)
    outcome = train(prepare_sft(run, pack, tokenizer, (*model, *base_layers), *teacher))
    if is_main_process():
        for path in tokenizer.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, work.payload / path.name)
        warn_if_tokenizer_differs(work.payload)
    return outcome
