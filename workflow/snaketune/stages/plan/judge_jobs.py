"""The jobs that ask a judge: `judge`, which scores the responses of a sample, and `compare`, which compares evaluations.

sample ── judge ── select             eval all/sft-tuned ─┐
                                      eval all/dpo-new ───┴─ compare all/dpo-new
"""

from typing import Any

from snaketune.config.evaluations import Evaluation
from snaketune.config.judging import Judge
from snaketune.config.operation import Execution
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, tokenizer_job, trusts_remote_code
from snaketune.stages.plan.model_jobs import eval_name, named_model
from snaketune.stages.specs import CompareSpec, JudgeModelSpec


def judge_job(
    context: Context,
    stage: str,
    name: str,
    judge: Judge,
    spec_type: type[JudgeModelSpec],
    settings: dict[str, Any],
    artifacts: dict[str, tuple[Job, ...]],
) -> Job:
    """A job that asks a judge. Args: settings: of its spec besides the judge's model; artifacts: what is judged."""
    config = context.config
    files: dict[str, tuple[str, ...]] = {"rubric": (judge.rubric,)}
    model: dict[str, Any] = {"base": None, "trust_remote_code": False, "frozen_weights": True}
    if judge.model:
        trained, weights, references = named_model(context, judge.model)
        model = {
            "base": weights.base,
            "trust_remote_code": trusts_remote_code(config, trained),
            "frozen_weights": all(job.spec.frozen_weights for job in references[:1]),
        }
        artifacts = (
            weights.artifacts | artifacts | {"tokenizer": (tokenizer_job(context, config.sft[trained].tokenizer),)}
        )
        files["base"] = weights.files
    spec = spec_type(
        **model,
        **settings,
        server_model=judge.server.model if judge.server else None,
        max_new_tokens=judge.max_new_tokens,
        batch_size=0 if judge.server else judge.batch_size,
    )
    operation = Execution(gpus=0 if judge.server else 1, engine=judge.engine, vllm=judge.vllm)
    return context.plan(stage, name, spec, artifacts, files=files, operation=operation)


def compare_jobs(context: Context, name: str, evaluation: Evaluation) -> None:
    """The jobs that compare the models of an evaluation with one of them."""
    judge = evaluation.judge
    if not judge:
        return
    opponent = context.jobs["eval", eval_name(name, judge.against)]
    for model in evaluation.every_policy(context.variants):
        if model != judge.against:
            evaluated = context.jobs["eval", eval_name(name, model)]
            compared: dict[str, tuple[Job, ...]] = {"evaluated": (evaluated,), "opponent": (opponent,)}
            judge_job(
                context, "compare", eval_name(name, model), judge, CompareSpec, {"prompts": judge.prompts}, compared
            )
