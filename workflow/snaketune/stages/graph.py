"""The job graph: all jobs of a config, by stage and name, for the rules to look up; the report is planned here."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, corpus_job, tokenizer_job
from snaketune.stages.plan.doctor_jobs import doctor_jobs
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.judge_jobs import compare_jobs
from snaketune.stages.plan.model_jobs import eval_job, merge_job
from snaketune.stages.plan.published_jobs import CHECKS, is_rung, reported
from snaketune.stages.plan.sample_jobs import sample_job, score_job
from snaketune.stages.plan.training_jobs import reward_job, sft_job
from snaketune.stages.plan.verify_jobs import verify_jobs
from snaketune.stages.specs import ReportSpec, spec_from
from snaketune.stages.table import STAGES
from snaketune.suggestions import unknown


class JobGraph:
    """All jobs of a config, by stage and name, and the duplicates among them.

    Attributes:
        config: the checked config.
        jobs: by stage and name.
        same_as: by manifest, the earlier job that makes the same result under another name.
    """

    def __init__(self, config: Workflow, variants: Variants):
        """Args: config and variants from `load`."""
        for name in config.reruns_on:
            if name not in STAGES:
                raise SnaketuneError(f"reruns_on: there is no stage {name!r}{unknown(name, STAGES)}")
        self.config = config
        self.jobs = {(job.stage, job.name): job for job in plan_jobs(config, variants)}
        self.same_as = _same(self.jobs.values())

    def job(self, stage: str, name: str) -> Job:
        """The job of that name; SnaketuneError if the config has none."""
        if (stage, name) not in self.jobs:
            raise SnaketuneError(
                f"the config has no {stage} job {name!r}{unknown(name, (j.name for j in self.stage(stage)))}"
            )
        return self.jobs[stage, name]

    def stage(self, stage: str) -> Iterator[Job]:
        return (job for job in self.jobs.values() if job.stage == stage)


def plan_jobs(config: Workflow, variants: Variants) -> tuple[Job, ...]:
    """All jobs of a config, each after those that it is made from; the report is the last. Args: from `config.load`."""
    context = Context(config=config, variants=variants)
    for plan, names in (
        (corpus_job, config.corpora),
        (tokenizer_job, config.tokenizers),
        (sft_job, config.sft),
        (dpo_job, config.dpo),
        (reward_job, config.reward),
        (merge_job, config.merge),
        (sample_job, config.sample),
        (score_job, config.score),
    ):
        for name in names:
            plan(context, name)
    doctor_jobs(context)
    for name, evaluation in config.eval.items():
        for model in evaluation.every_model(variants):
            eval_job(context, name, evaluation, model)
        compare_jobs(context, name, evaluation)
    verify_jobs(context)
    planned = tuple(context.jobs.values())
    for stage in STAGES.values():
        for job in stage.jobs(config, planned) if stage.jobs else ():
            context.add(job)
    _report_job(context)
    return tuple(context.jobs.values())


def _report_job(context: Context) -> Job:
    """Plan the job of the report, which reads all results that it shows."""
    # Sorted, so that the order of the config doesn't matter.
    stages = list(STAGES)
    compared = {
        identity
        for job in context.jobs.values()
        if job.stage == "race"
        for identity in map(id, job.artifacts["evaluated"])
    }
    chosen = (
        job
        for job in context.jobs.values()
        # Of races, the comparisons are shown, not what they compare.
        if _is_shown(context, job) and id(job) not in compared and not is_rung(context.config, job)
    )
    jobs = tuple(sorted(chosen, key=lambda job: (stages.index(job.stage), job.name)))
    grids = {
        (section, variant): f"{section}.{name}"
        for section, names in context.variants.items()
        for name, variants in names.items()
        for variant in variants
        if variant != name
    }
    shown = tuple(reported(job, job.artifacts, grids.get((job.stage, job.name), "")) for job in jobs)
    return context.plan("report", "", spec_from(ReportSpec, context.config.report, jobs=shown), {"results": jobs})


def _is_shown(context: Context, job: Job) -> bool:
    """Whether the report reads a job's result: of checks, only if the config asks for it."""
    return STAGES[job.stage].in_report or (job.stage in CHECKS and context.config.verify.report)


def _same(jobs: Iterable[Job]) -> dict[str, Job]:
    """By manifest, the earlier job that makes the same result under another name. The later one waits for it and reuses it.

    Duplicates are variants of a grid that equal the run they extend, runs with equal keys, and everything made from them.
    """
    first: dict[tuple[Any, ...], Job] = {}
    same: dict[str, Job] = {}
    for job in jobs:
        made_from = {
            role: tuple(same.get(upstream.manifest, upstream).manifest for upstream in inputs)
            for role, inputs in job.artifacts.items()
        }
        spec, read = json.dumps(job.plain_spec, sort_keys=True), tuple(sorted((made_from | job.files).items()))
        earlier = first.setdefault((job.stage, spec, read), job)
        if earlier is not job:
            same[job.manifest] = earlier
    return same
