"""The `judge` stage: scores of a sample's responses by a model (`sampling.judge_questions`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import JudgeSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.judge_questions",
    spec=JudgeSpec,
    payload="scores",
    inputs={
        "samples": exactly_one("sample"),
        "tokenizer": any_number("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("rubric", "base"),
    libraries=libraries.MODEL,
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)
