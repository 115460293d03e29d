"""What rules look up: their jobs, inputs, and whether results are current (workflow/snaketune/stages/planner.py decides that)."""

import os
import shlex
from contextlib import contextmanager
from functools import cache

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod, ExecMode, RerunTrigger

from snaketune.config.base import NAME_PATTERN
from snaketune.errors import SnaketuneError
from snaketune.publishing.push import pushed_jobs
from snaketune.stages.jobs import RESULTS
from snaketune.stages.linked import check_place
from snaketune.stages.planner import Planner
from snaketune.stages.status import made_from
from snaketune.stages.table import STAGES

# Jobs run in their rule's environment, where the package itself isn't installed. Idle threads sleep instead of spinning: nothing
# is lost alone, and nothing collapses when something else wants a core. The config is for messages, which name whole commands.
PREFIX = (
    "set -euo pipefail; export OMP_WAIT_POLICY=PASSIVE RAYON_NUM_THREADS=$OMP_NUM_THREADS "
    f"PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))} "
    f"SNAKETUNE_CONFIG={shlex.quote(shlex.join(map(str, workflow.overwrite_configfiles)))}; "
)
# Snakemake formats it.
shell.prefix(PREFIX.replace("{", "{{").replace("}", "}}"))

# A process that runs single jobs for the one that planned them decides nothing.
PLANS = workflow.exec_mode == ExecMode.DEFAULT
METHODS = workflow.deployment_settings.deployment_method if workflow.deployment_settings else frozenset()
DEPLOYS = bool(METHODS & {DeploymentMethod.CONDA, DeploymentMethod.APPTAINER})
# A job that is shown its inputs by links needs all of them named.
LINKS_INPUTS = bool(workflow.storage_settings and workflow.storage_settings.default_storage_provider)


@contextmanager
def plain_errors():
    """Snakemake shows its own errors without a traceback."""
    try:
        yield
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None


def is_forced(job):
    """Whether the command line forces a job, so that what is made from it runs too."""
    settings = workflow.dag_settings
    forced = {str(name) for name in (*settings.forcerun, *(settings.targets if settings.forcetargets else ()))}
    # A module's rule may have another name.
    rule_name = getattr(rules, job.stage).rule.name
    return settings.forceall or not forced.isdisjoint((rule_name, job.manifest, job.payload, job.run))


with plain_errors():
    planner = Planner(config, is_forced=is_forced, deploys=DEPLOYS)
graph = planner.graph


wildcard_constraints:
    name=NAME_PATTERN,
    evaluation=NAME_PATTERN,
    model=NAME_PATTERN,
    variant=NAME_PATTERN,
    part=r"\d+-of-\d+",
    repeat=r"\d+",


def job_of(stage, wildcards):
    """The job that a rule's wildcards name."""
    with plain_errors():
        return graph.job(stage, "/".join(wildcards))


@cache
def log_triggers():
    """Job files say what is stale; by what Snakemake compares besides, it may run jobs that then find their results made."""
    if workflow.dag_settings.rerun_triggers != {RerunTrigger.MTIME}:
        logger.info("note: --rerun-triggers mtime is enough here; with others, current results may be looked up once more")


def is_current(job):
    """Whether a result is as the config has it; what is stale is logged, and refused where it could never run."""
    if not PLANS:
        return True
    with plain_errors():
        log_triggers()
        planner.write_job_files()
        for line in planner.results.tell(job):
            logger.info(line)
        current = planner.results.of(job).current
        if not current:
            check_before_run(job)
        return current


def inputs_of(stage):
    """A job's file, and what the job reads by role.

    Inputs of a current result are ancient: nothing has changed in them, however new they look. Those of a stale one aren't, since
    Snakemake doesn't look at what is made from a job that runs, unless by inputs that count.
    """

    def inputs(wildcards):
        job = job_of(stage, wildcards)
        mark = ancient if is_current(job) else str
        with plain_errors():
            read = planner.inputs(job, every=LINKS_INPUTS)
        job_file = str(planner.job_file(job))
        return {role: list(map(mark, paths)) for role, paths in read.items()} | {
            "job": job_file if PLANS else ancient(job_file)
        }

    return inputs


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
            raise WorkflowError(f"the config has no `{key}:`, so there is nothing to make; config/README.md has its keys")
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
        check_place(link)
    return {"best": directory(str(link))}


def pushed(wildcards):
    """The models that `push:` names, and their cards."""
    with plain_errors():
        return results(pushed_jobs(graph))


def log_left_out():
    """Stale jobs of this run that Snakemake didn't run, as `--until` has it, or as it skips what is made from an old result."""
    if left_out := planner.left_out():
        logger.warning(f"stale, and not run: {', '.join(left_out)}; run again")
