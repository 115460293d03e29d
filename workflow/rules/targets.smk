"""The inputs of targets that aren't files: `all`, `doctor`, `calibrations`, `gguf`, `push`."""

from snaketune.publishing.push import pushed_jobs
from snaketune.stages.job import RESULTS
from snaketune.stages.links import check_link
from snaketune.stages.cache.status import made_from


def results(jobs, key=""):
    """Return the manifests of jobs that have to be in Snakemake's graph, of one at least, since a target without inputs would
    run; stale jobs are logged. Args: key: the config key without which there are none."""
    if key and not jobs:
        raise Error(f"the config has no `{key}:`, so there is nothing to make; see config/README.md for its keys")
    listed = [job.manifest for job in jobs if not is_current(job) or lists_current()]
    return listed or [job.manifest for job in jobs[:1]]


def results_of(stage, key=""):
    """Return an input function for all results of a stage. Args: key: the config key that they come from."""
    return lambda wildcards: results([*graph.stage(stage)], key)


def all_results(wildcards):
    """Return everything that the config describes, besides the report's own files."""
    report_job = graph.job("report", "")
    # The report depends on all results, so what is stale is logged as one list.
    is_current(report_job)
    return results([*made_from(report_job), *graph.stage("merge"), *graph.stage("card")])


def link_to_best():
    """Return the link to the best run's model, an output of the report if the config ranks runs."""
    if not graph.config.report.sort_by:
        return {}
    link = RESULTS / STAGES["report"].link
    with plain_errors():
        check_link(link)
    return {"best": directory(str(link))}


def pushed(wildcards):
    """Return the models that `push:` names, and their cards."""
    with plain_errors():
        return results(pushed_jobs(graph))


def log_not_run():
    """Log the stale jobs that Snakemake skipped though no option excludes them."""
    limited = workflow.dag_settings.until or workflow.dag_settings.omit_from
    if not limited and (not_run := planner.not_run()):
        logger.warning(f"stale, and not run: {', '.join(not_run)}; run again")
