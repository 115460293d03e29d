"""Passes of models that aren't trained, over the rows of a pack: reference log-probabilities, and a teacher's tokens. A pass is
one job, or parts in parallel and a job that gathers them."""

from typing import Any

from snaketune.config.base_models import Pretrained
from snaketune.config.named_entries import sft_of
from snaketune.config.operation import Execution
from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.data_jobs import Context, Weights, trusts_remote_code
from snaketune.stages.plan.training_jobs import run_job, weights_of
from snaketune.stages.specs import FrozenSpec


def named_weights(context: Context, model: Pretrained | str) -> Weights:
    """The weights of a model from outside, or of `sft:NAME` or `dpo:NAME`."""
    if isinstance(model, Pretrained):
        return Weights(base=model)
    return weights_of(context, context.config.run_of(model), run_job(context, model))


def allows_code_of(config: Workflow, model: Pretrained | str) -> bool:
    """Whether the config allows running the code that comes with such a model."""
    if isinstance(model, Pretrained):
        return model.trust_remote_code
    return trusts_remote_code(config, sft_of(config, *model.split(":")))


def plan_pass(
    context: Context,
    stages: tuple[str, str],
    of: str,
    specs: tuple[FrozenSpec, type[FrozenSpec]],
    weights: Weights,
    pack: Job,
    tokenizer: tuple[Job, ...],
    parts: int,
    operation: Execution,
    after: tuple[Job, ...] = (),
) -> Job:
    """Plan a pass, unless an earlier run has planned it, and return its job.

    Args:
        stages, specs: of the whole, and of one of its parts.
        of: what it is named after besides the pack: `NAME` of an SFT run or of a teacher, or `dpo:NAME`.
        tokenizer: that of the rows, if the pass reads one.
    """
    (whole, part_stage), (spec, part_spec) = stages, specs
    name = f"{of.removeprefix('dpo:')}-{pack.name}-{short_digest(spec, of, pack.name)}"
    if job := context.jobs.get((whole, name)):
        return job
    artifacts = weights.artifacts | {"pack": (pack,), "tokenizer": tokenizer}
    inputs: dict[str, Any] = {"artifacts": artifacts, "files": {"base": weights.files}}
    planned = tuple(
        context.plan(
            part_stage,
            f"{name}/{part}-of-{parts}",
            part_spec.model_validate(dict(spec) | {"part": part, "parts": parts}),
            operation=operation,
            after=after,
            **inputs,
        )
        for part in (range(1, parts + 1) if parts > 1 else ())
    )
    if planned:
        pattern = planned[0].manifest.replace(f"/1-of-{parts}/", f"/*-of-{parts}/")
        operation = operation.model_copy(update={"parts": pattern})
    return context.plan(whole, name, spec, operation=operation, after=(*after, *planned), **inputs)
