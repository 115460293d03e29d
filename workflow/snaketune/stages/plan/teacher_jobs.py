"""The `teacher` and `teacher_pass` jobs of runs that are distilled. The config doesn't name them: they are named after teacher
and pack with a digest of the spec, and runs share them."""

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Sft
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, pack_of, tokenizer_job
from snaketune.stages.plan.passes import allows_code_of, named_weights, plan_pass
from snaketune.stages.specs import TeacherPassSpec, TeacherSpec


def teacher_job(context: Context, run: Sft) -> Job:
    """The job of the teacher's tokens for the rows of a run, which has `distill`."""
    assert run.distill
    name = run.distill.teacher
    teacher = context.config.teacher[name]
    settings = teacher.operation
    weights = named_weights(context, teacher.model)
    spec = TeacherSpec(
        precision=teacher.precision,
        frozen_weights=True,
        quantization=teacher.quantization,
        base=weights.base,
        trust_remote_code=allows_code_of(context.config, teacher.model),
        k=teacher.k,
        temperature=run.distill.temperature,
    )
    pack, tokenizer = pack_of(context, run), tokenizer_job(context, run.tokenizer)
    operation = Execution(gpus=settings.gpus, allow_cpu=settings.allow_cpu)
    stages, specs = ("teacher", "teacher_pass"), (spec, TeacherPassSpec)
    return plan_pass(context, stages, name, specs, weights, pack, (tokenizer,), settings.parts, operation)
