"""The `card` and `convert` jobs, which follow from the config and the jobs of other stages."""

from collections.abc import Iterable, Iterator

from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import corpus_of
from snaketune.stages.specs import CardSpec, ConvertSpec, CorpusDescription, ReportedJob, spec_from

# What a card says of a training's inputs.
OF_TRAINING = ("model", "pack", "reference", "teacher")
# The stages that check a finished training.
CHECKS = ("verification", "reproduction")


def convert_jobs(config: Workflow, jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the job of each entry of `gguf:`."""
    models = {f"{job.stage}:{job.name}": job for job in jobs}
    for name, gguf in config.gguf.items():
        artifacts: dict[str, tuple[Job, ...]] = {"model": (models[gguf.model],)}
        yield Job(stage="convert", name=name, spec=ConvertSpec(type=gguf.type), artifacts=artifacts)


def card_jobs(config: Workflow, jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the job of the model card of each training."""
    jobs = tuple(jobs)
    evaluations: dict[str, list[Job]] = {}
    # Sorted, so that the order of the config doesn't matter.
    for job in sorted((job for job in jobs if job.stage == "eval"), key=lambda job: job.name):
        evaluations.setdefault(job.name.partition("/")[2], []).append(job)
    for job in jobs:
        if job.stage in ("sft", "dpo", "reward") and not is_rung(config, job):
            name = f"{job.stage}-{job.name}"
            checks = [one for one in jobs if one.stage in CHECKS and one.name == name]
            yield _card_job(config, job, name, evaluations.get(name, []), checks if config.verify.report else [])


def _card_job(config: Workflow, training: Job, name: str, evaluations: list[Job], checks: list[Job]) -> Job:
    # The training and those that it continues, the last one first.
    trainings = [training]
    while before := trainings[-1].artifacts.get("model", ())[:1]:
        trainings += before
    packs = [run.artifacts["pack"][0] for run in trainings]
    teachers = [teacher for run in trainings for teacher in run.artifacts.get("teacher", ())]
    # The corpora of evaluations are shown too, with their sources.
    evaluated = [pack for evaluation in evaluations for pack in evaluation.artifacts["packs"]]
    corpora = {corpus.name: corpus for corpus in map(corpus_of, [*packs, *evaluated])}
    shown: list[tuple[Job, dict[str, tuple[Job, ...]]]] = [
        *((run, {role: run.artifacts.get(role, ())[:1] for role in OF_TRAINING}) for run in trainings),
        # Two runs may share their teacher, and their rows.
        *(
            (of, {"model": of.artifacts["model"][:1]})
            for of in {teacher.name: teacher for teacher in teachers}.values()
        ),
        *((pack, {"corpus": (corpus_of(pack),)}) for pack in {pack.name: pack for pack in packs}.values()),
        *((evaluation, {}) for evaluation in evaluations),
        *((check, {}) for check in checks),
        *((corpora[corpus], {}) for corpus in sorted(corpora)),
    ]
    licenses = (config.sft[run.name].license for run in trainings if run.stage == "sft")
    trained_on = sorted({corpus_of(pack).name for pack in packs})
    spec = CardSpec(
        model=f"{training.stage}:{training.name}",
        license=next(filter(None, licenses), None),
        corpora={corpus: spec_from(CorpusDescription, config.corpora[corpus]) for corpus in trained_on},
        jobs=tuple(reported(job, made_from) for job, made_from in shown),
    )
    return Job(stage="card", name=name, spec=spec, artifacts={"results": tuple(job for job, _ in shown)})


def reported(job: Job, made_from: dict[str, tuple[Job, ...]], grid: str = "") -> ReportedJob:
    """A job as the report and the cards show it, with its inputs by role and the grid that it belongs to."""
    keys = {role: tuple(upstream.key for upstream in jobs) for role, jobs in made_from.items() if jobs}
    return ReportedJob(stage=job.stage, name=job.name, made_from=keys, config_key=grid)


def is_rung(config: Workflow, job: Job) -> bool:
    """Whether a job is a training's snapshot at a rung of its race."""
    if job.stage not in ("sft", "dpo"):
        return False
    variant, _, share = job.name.partition("@")
    run = getattr(config, job.stage).get(variant)
    return bool(share and run and run.race and job.spec.training.until in run.race.rungs)
