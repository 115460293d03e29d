"""Passes of models that aren't trained, over the rows of a pack: reference log-probabilities, and a teacher's tokens. A pass is
one job, or parts in parallel and a job that gathers them."""

from typing import Any

from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, Weights
from snaketune.stages.plan.training_jobs import run_job, weights_of
from snaketune.stages.specs import FrozenSpec


def named_weights(context: Context, model: Pretrained | str) -> Weights:
    """The weights of a model from outside, or of `sft:NAME` or `dpo:NAME`."""
    if isinstance(model, Pretrained):
        return Weights(base=model)
    return weights_of(context, context.config.run_of(model), run_job(context, model))


def plan_pass(
    context: Context,
    stages: tuple[str, str],
    name: str,
    specs: tuple[FrozenSpec, type[FrozenSpec]],
    parts: int,
    operation: Execution,
    after: tuple[Job, ...] = (),
    **inputs: Any,
) -> Job:
    """Plan a pass and return its job.

    Args:
        stages, specs: of the whole, and of one of its parts.
        inputs: `artifacts` and `files`, which the parts read too.
    """
    (whole, part_stage), (spec, part_spec) = stages, specs
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
