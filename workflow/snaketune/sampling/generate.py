"""The `generate` stage: the responses to one part of a sample's prompts (`sampling.part`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import GenerateSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.part",
    spec=GenerateSpec,
    payload="responses",
    job_name="{name}/{part}",
    inputs={
        "prompts": exactly_one("prompts"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.MODEL,
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    array=True,
)
