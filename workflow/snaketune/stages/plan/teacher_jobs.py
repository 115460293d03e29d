"""The `teacher` and `teacher_pass` jobs of runs that are distilled. The config doesn't name them: they are named after teacher
and pack with a digest of the spec, and runs share them."""

from snaketune.config.base_models import Pretrained
from snaketune.config.named_entries import sft_of
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Sft
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.data_jobs import Context, pack_of, tokenizer_job, trusts_remote_code
from snaketune.stages.plan.passes import named_weights, plan_pass
from snaketune.stages.plan.training_jobs import base_of_model
from snaketune.stages.specs import TeacherPassSpec, TeacherSpec


def teacher_job(context: Context, run: Sft) -> Job:
    """The job of the teacher's tokens for the rows of a run, which has `distill`."""
    assert run.distill
    config, name = context.config, run.distill.teacher
    teacher, pack = config.teacher[name], pack_of(context, run)
    model, settings = teacher.model, teacher.operation
    weights = named_weights(context, model)
    if isinstance(model, Pretrained):
        base, trusted = model, model.trust_remote_code
    else:
        base = base_of_model(config, model)
        trusted = trusts_remote_code(config, sft_of(config, *model.split(":")))
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
    operation, specs = Execution(gpus=settings.gpus, allow_cpu=settings.allow_cpu), (spec, TeacherPassSpec)
    return plan_pass(context, ("teacher", "teacher_pass"), job_name, specs, settings.parts, operation, **inputs)
