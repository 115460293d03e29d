"""The `eval` stage: evaluates one model on held-out rows (`evaluation.model_scores`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import EvalSpec

STAGE = Stage(
    module=__name__,
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
    libraries=libraries.of_evaluation,
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)


def build(
    spec: EvalSpec,
    work: WorkFolder,
    *,
    model: list[Artifact],
    tokenizer: Artifact,
    corpora: list[Artifact],
    packs: list[Artifact],
    ref_logps: list[Artifact],
    base: list[Path],
    tasks: list[Path],
    task_data: list[Path],
    operation: Execution,
    base_layers: Sequence[Artifact] = (),
    kl_from: Sequence[Artifact] = (),
    kl_base: Sequence[Path] = (),
    teacher: Sequence[Artifact] = (),
    taught_pack: Sequence[Artifact] = (),
) -> Outcome:
    """Fill `work.payload` with scores, responses, losses and log-probabilities; see `score_model`.

    Args:
        task_data: files outside the tasks' folder that tasks name; lm-eval reads them itself.
        kl_from, kl_base: the results and the base of the model from which the divergence is measured.
        teacher, taught_pack: a teacher's tokens, and the rows that they belong to.
        operation: with the engine of responses.
    """
    if spec.rewards:
        from snaketune.evaluation.reward_scores import score_reward_model

        return score_reward_model(spec, work, model=model[0], packs=packs)
    from snaketune.evaluation.model_scores import score_model

    return score_model(
        spec,
        work,
        results=(*model, *base_layers),
        tokenizer=tokenizer,
        corpora=corpora,
        packs=packs,
        ref_logps=ref_logps,
        base=base,
        kl_from=tuple(kl_from),
        taught=(*teacher, *taught_pack),
        tasks=tasks,
        operation=operation,
    )
