"""The `rate` stage: scores of a sample's responses by a reward model (`sampling.reward_model`)."""

from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import RateSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.reward_model",
    spec=RateSpec,
    payload="scores",
    inputs={"samples": exactly_one("sample"), "model": any_number("reward")},
    files=("base",),
    libraries=("torch", "transformers"),
    operation=("gpus",),
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)
