"""The `reward` stage: a reward model, trained on packed pairs in worker processes (`engine.reward`), as a folder that
`AutoModelForSequenceClassification` loads.

A reward is that of the last token of a completion, its end of turn. The folder's chat template writes nothing after it, so that
a loaded model gives the reward that was trained (`training.reward_files`).
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
from snaketune.stages.specs import RewardSpec

if TYPE_CHECKING:
    from snaketune.tracking.curves import TrackedRun

STAGE = Stage(
    module=__name__,
    spec=RewardSpec,
    payload="model",
    inputs={"model": exactly_one("sft"), "pack": exactly_one("pack"), "base_layers": any_number("sft")},
    files=("base",),
    libraries=libraries.TRAINING,
    operation=TRAINING,
    launcher="snaketune.training.launch.oom_retry",
    cost=ModelCost(flops=6, disk_per_parameter=4),
    group="models",
    in_report=True,
)


def build(
    spec: RewardSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    pack: Artifact,
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    tracked: "TrackedRun | None" = None,
) -> Outcome:
    """Write a model folder to `work.payload`: weights, config, tokenizer and chat template.

    Args:
        base_layers, base: the results and the base that `model` is applied to, if it is only an adapter.
    """
    from snaketune.training.launch.worker import is_main_process
    from snaketune.training.pipeline import train
    from snaketune.training.prepared import TrainingRun
    from snaketune.training.prepared_reward import prepare_reward
    from snaketune.training.reward_files import add_tokenizer

    for result in (model, *base_layers):
        result.files()
    run = TrainingRun.of(spec, operation, work, tracked)
    outcome = train(prepare_reward(run, (model, *base_layers), pack))
    if is_main_process():
        add_tokenizer(model, work.payload)
    return outcome
