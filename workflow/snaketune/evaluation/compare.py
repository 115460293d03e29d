"""The `compare` stage: a judge compares a model's responses with those of another model (`evaluation.comparison`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import CompareSpec

# How long the responses may be.
GENERATED = ("spec.generation.max_new_tokens",)
STAGE = Stage(
    module=__name__,
    work="snaketune.evaluation.comparison",
    spec=CompareSpec,
    payload="verdicts",
    job_name="{evaluation}/{model}",
    inputs={
        "evaluated": exactly_one("eval", entries=GENERATED),
        "opponent": exactly_one("eval", entries=GENERATED),
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
