"""The `rate` stage: scores of a sample's responses by a reward model (`sampling.reward_model`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RateSpec

STAGE = Stage(
    module=__name__,
    spec=RateSpec,
    payload="scores",
    inputs={"samples": exactly_one("sample"), "model": any_number("reward")},
    files=("base",),
    libraries=libraries.always("torch", "transformers"),
    operation=("gpus",),
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)


def build(
    spec: RateSpec,
    work: WorkFolder,
    *,
    samples: Artifact,
    model: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
) -> Outcome:
    """Write `scores.arrow` to `work.payload`.

    Args:
        model: a reward model that was trained here, if `spec.base` names none.
        base: files of a local model, which `spec.base` names.
    """
    from snaketune.sampling.reward_model import score_by_reward_model

    return score_by_reward_model(spec, work, samples, base, model)
