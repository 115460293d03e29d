"""All jobs of a config, each with its spec and what it is made from."""

from collections.abc import Iterable, Iterator

from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job
from snaketune.stages.plan.card_jobs import reported
from snaketune.stages.plan.context import Context, Variants
from snaketune.stages.plan.data_jobs import corpus_job, tokenizer_job
from snaketune.stages.plan.diagnosis_jobs import audit_jobs, diagnosis_job
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.eval_jobs import eval_job
from snaketune.stages.plan.run_settings import evaluated_models
from snaketune.stages.plan.training_jobs import sft_job
from snaketune.stages.specs import ReportSpec
from snaketune.stages.table import STAGES


def plan_jobs(config: Workflow, variants: Variants) -> tuple[Job, ...]:
    """Return all jobs of a config, each after those that it is made from; the report is the last.

    Args:
        config, variants: from `config.load`.
    """
    context = Context(config=config, variants=variants)
    for plan, names in (
        (corpus_job, config.corpora),
        (tokenizer_job, config.tokenizers),
        (sft_job, config.sft),
        (dpo_job, config.dpo),
        (diagnosis_job, config.diagnose),
    ):
        for name in names:
            plan(context, name)
    audit_jobs(context)
    for name, evaluation in config.eval.items():
        for model in evaluated_models(evaluation, variants):
            eval_job(context, name, model)
    for job in derived_jobs(context, tuple(context.jobs.values())):
        context.add(job)
    context.add(report_job(context))
    return tuple(context.jobs.values())


def derived_jobs(context: Context, jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the jobs that follow from the config and all jobs planned so far; they precede the report."""
    for stage in STAGES.values():
        if stage.jobs:
            yield from stage.jobs(context.config, jobs)


def report_job(context: Context) -> Job:
    """Return the job of the report, which reads all results that it shows."""
    # Sorted, so that the order of the config doesn't matter.
    stages = list(STAGES)
    chosen = (job for job in context.jobs.values() if STAGES[job.stage].in_report)
    jobs = tuple(sorted(chosen, key=lambda job: (stages.index(job.stage), job.name)))
    grids = {
        (section, variant): f"{section}.{name}"
        for section, names in context.variants.items()
        for name, variants in names.items()
        for variant in variants
        if variant != name
    }
    shown = tuple(reported(job, job.artifacts, grids.get((job.stage, job.name), "")) for job in jobs)
    spec = ReportSpec(**context.config.report.model_dump(), jobs=shown)
    return Job(stage="report", name="", spec=spec, artifacts={"results": jobs})
