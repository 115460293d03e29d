"""The `eval` stage: evaluates one model on held-out rows (`evaluation.model_scores`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import EvalSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.evaluation.model_scores",
    spec=EvalSpec,
    payload="scores",
    job_name="{evaluation}/{model}",
    inputs={
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo", "merge", "reward"),
        "base_layers": any_number("sft", "dpo"),
        "corpora": any_number("corpus"),
        "packs": any_number("pack"),
        "kl_from": any_number("sft", "dpo", "merge"),
        "teacher": any_number("teacher"),
        "taught_pack": any_number("pack"),
        "ref_logps": any_number("ref_logps", entries=("dtype", "kernel", "spec.frozen_weights", "spec.quantization")),
    },
    files=("base", "kl_base", "tasks", "task_data"),
    libraries=(*libraries.MODEL, "lm_eval", "datasets"),
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)
