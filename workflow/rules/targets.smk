"""What targets that aren't files stand for: `all`, `doctor`, `diagnose`, `calibrations`, `gguf`, `push`."""

from snaketune.publishing.push import pushed_jobs
from snaketune.stages.job import RESULTS
from snaketune.stages.links import check_link
from snaketune.stages.cache.status import made_from


def results(jobs):
    """Manifests and payloads of jobs; what is stale is logged."""
    for job in jobs:
        is_current(job)
    return [path for job in jobs for path in (job.manifest, job.payload)]


def results_of(stage, key=""):
    """All results of a stage. Args: key: of the config, without which there are none."""

    def results_of_stage(wildcards):
        jobs = list(graph.stage(stage))
        if key and not jobs:
            raise WorkflowError(
                f"the config has no `{key}:`, so there is nothing to make; config/README.md has its keys"
            )
        return results(jobs)

    return results_of_stage


def all_results(wildcards):
    """Everything that the config describes, besides the report's own files."""
    report_job = graph.job("report", "")
    # First of all, so that what is stale is logged as one list.
    is_current(report_job)
    return results([*made_from(report_job), *graph.stage("card")])


def link_to_best():
    """The link to the model of the best run, an output of the report where the config says by what runs are compared."""
    if not graph.config.report.sort_by:
        return {}
    link = RESULTS / STAGES["report"].link
    with plain_errors():
        check_link(link)
    return {"best": directory(str(link))}


def pushed(wildcards):
    """The models that `push:` names, and their cards."""
    with plain_errors():
        return results(pushed_jobs(graph))


def log_not_run():
    """Name the stale jobs that Snakemake left out though no option excludes them."""
    limited = workflow.dag_settings.until or workflow.dag_settings.omit_from
    if not limited and (not_run := planner.not_run()):
        logger.warning(f"stale, and not run: {', '.join(not_run)}; run again")
