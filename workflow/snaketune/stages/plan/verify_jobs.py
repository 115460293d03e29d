"""The jobs of `snakemake verify` and `snakemake replay`: a `verification` and a `reproduction` for each trained model."""

from snaketune.config.operation import Execution
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, corpus_of
from snaketune.stages.plan.published_jobs import convert_jobs, is_rung
from snaketune.stages.specs import ReproductionSpec, VerificationSpec

# Inputs of a training that its verification and its reproduction read under the same roles.
OF_TRAINING = ("pack", "tokenizer", "ref_logps", "reference")


def verify_jobs(context: Context) -> None:
    """Plan the checks of each SFT and DPO run; not of snapshots that only a race compares."""
    planned = [*context.jobs.values()]
    converted = sorted(convert_jobs(context.config, planned), key=lambda job: job.name)
    files = {id(job.artifacts["model"][0]): context.add(job) for job in reversed(converted)}
    for job in planned:
        if job.stage in ("sft", "dpo") and not is_rung(context.config, job):
            _verification_job(context, job, files.get(id(job)))
    for job in planned:
        # The steps of a snapshot are those of its run.
        if job.stage in ("sft", "dpo") and "@" not in job.name:
            _reproduction_job(context, job, planned)


def _verification_job(context: Context, training: Job, file: Job | None) -> Job:
    """Args: file: the job of a GGUF file of it."""
    name = f"{training.stage}-{training.name}"
    evaluations = [
        job
        for job in context.jobs.values()
        if job.stage == "eval" and job.name.partition("/")[2] == name and job.artifacts["packs"]
    ]
    # Sorted, so that the order of the config doesn't matter.
    evaluation = min(evaluations, key=lambda job: job.name, default=None)
    # Checks compare the loss of the tokens themselves, which needs no teacher.
    run = training.spec.model_copy(update={"distill": None}) if training.stage == "sft" else training.spec
    spec = VerificationSpec(
        run=run,
        rows=context.config.verify.rows,
        conversations=evaluation.spec.conversations if evaluation else (),
        preferences=evaluation.spec.preferences if evaluation else (),
        gguf_type=file.spec.type if file else None,
    )
    inputs = {
        "model": (training,),
        "start": (*training.artifacts["model"], *training.artifacts["base_layers"]),
        "corpus": (corpus_of(training.artifacts["pack"][0]),),
        "evaluation": (evaluation,) if evaluation else (),
        "evaluated": evaluation.artifacts["packs"] if evaluation else (),
        "prompted": evaluation.artifacts["corpora"] if evaluation else (),
        "gguf": (file,) if file else (),
    }
    inputs |= {role: training.artifacts.get(role, ()) for role in OF_TRAINING}
    trained = training.operation
    operation = Execution(
        gpus=min(trained.gpus, 1),
        allow_cpu=trained.allow_cpu,
        load_in_memory=trained.load_in_memory,
        share_kernels=trained.share_kernels,
    )
    return context.plan("verification", name, spec, inputs, files=training.files, operation=operation)


def _reproduction_job(context: Context, training: Job, planned: list[Job]) -> Job:
    snapshots = (job for job in planned if job.stage == training.stage and job.name.startswith(f"{training.name}@"))
    inputs = {
        "model": (training,),
        "snapshots": tuple(snapshots),
        "start": (*training.artifacts["model"], *training.artifacts["base_layers"]),
    }
    inputs |= {role: training.artifacts.get(role, ()) for role in (*OF_TRAINING, "teacher")}
    return context.plan(
        "reproduction",
        f"{training.stage}-{training.name}",
        ReproductionSpec(run=training.spec),
        inputs,
        files=training.files,
        # Its resources are those of the training.
        operation=training.operation,
    )
