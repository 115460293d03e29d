"""The `teacher` and `teacher_pass` jobs of runs that are distilled. The config doesn't name them: they are named after teacher
and pack with a digest of the spec, and runs share them."""

from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Sft
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.data_jobs import Context, Weights, pack_of, tokenizer_job, trusts_remote_code
from snaketune.stages.plan.training_jobs import base_of_model, run_job, weights_of
from snaketune.stages.specs import TeacherPassSpec, TeacherSpec


def teacher_job(context: Context, run: Sft) -> Job:
    """The job of the teacher's tokens for the rows of a run, which has `distill`."""
    assert run.distill
    config, name = context.config, run.distill.teacher
    teacher, pack = config.teacher[name], pack_of(context, run)
    model, settings = teacher.model, teacher.operation
    if isinstance(model, Pretrained):
        weights, base, trusted = Weights(base=model), model, model.trust_remote_code
    else:
        weights = weights_of(context, config.run_of(model), run_job(context, model))
        section, _, of = model.partition(":")
        base = base_of_model(config, model)
        trusted = trusts_remote_code(config, of if section == "sft" else config.sft_below(config.dpo[of]))
    spec = TeacherSpec(
        precision=teacher.precision,
        frozen_weights=True,
        quantization=teacher.quantization,
        base=base,
        trust_remote_code=trusted,
        k=teacher.k,
        temperature=run.distill.temperature,
    )
    job_name = f"{name}-{pack.name}-{short_digest(spec, name, pack.name)}"
    if job := context.jobs.get(("teacher", job_name)):
        return job
    inputs = {
        "artifacts": weights.artifacts | {"pack": (pack,), "tokenizer": (tokenizer_job(context, run.tokenizer),)},
        "files": {"base": weights.files},
    }
    operation, count = Execution(gpus=settings.gpus, allow_cpu=settings.allow_cpu), settings.parts
    specs = [TeacherPassSpec(**dict(spec), part=part + 1, parts=count) for part in range(count)] if count > 1 else []
    parts = tuple(
        context.plan("teacher_pass", f"{job_name}/{part.part}-of-{count}", part, operation=operation, **inputs)
        for part in specs
    )
    if parts:
        pattern = parts[0].manifest.replace(f"/1-of-{count}/", f"/*-of-{count}/")
        operation = operation.model_copy(update={"parts": pattern})
    return context.plan("teacher", job_name, spec, operation=operation, after=parts, **inputs)
