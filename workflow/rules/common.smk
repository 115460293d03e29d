"""Functions that rules use to look up jobs and inputs, and whether results are current (decided by stages/planner.py)."""

import os
from contextlib import contextmanager
from functools import cache

from snakemake.logging import logger
from snakemake.settings.types import RerunTrigger

from snaketune.config.base import JOB_PATTERN
from snaketune.config.task_files import check_shipped_tasks
from snaketune.errors import SnaketuneError
from snaketune.stages.planner import Planner
from snaketune.stages.table import STAGES


@contextmanager
def plain_errors():
    """Turn errors of the package into those that Snakemake shows by their message alone."""
    try:
        yield
    except SnaketuneError as error:
        raise Error(str(error)) from None


def is_forced(job):
    """Return True if the command line forces a job, so that everything made from it runs too."""
    settings = workflow.dag_settings
    names = (*settings.forcerun, *(settings.targets if settings.forcetargets else ()))
    forced = set(map(os.path.normpath, names))
    # The Snakefile that uses this one as a module may have renamed the rule.
    rule_name = getattr(rules, job.stage).rule.name
    return settings.forceall or not forced.isdisjoint((rule_name, job.manifest, job.payload, job.run))


with plain_errors():
    planner = Planner(config, is_forced=is_forced, deploys=DEPLOYS)
    if PLANS and not DEPLOYS:
        check_shipped_tasks(planner.graph.config)
graph = planner.graph


wildcard_constraints:
    name=JOB_PATTERN,
    evaluation=JOB_PATTERN,
    model=JOB_PATTERN,
    variant=JOB_PATTERN,
    part=r"\d+-of-\d+",
    repeat=r"\d+",


def job_of(stage, wildcards):
    """Return the job that a rule's wildcards name."""
    with plain_errors():
        return graph.job(stage, "/".join(wildcards))


@cache
def start_planning():
    """Write the job files of this run, before anything is looked up.

    The effect of triggers other than times is logged: a training has fewer inputs once its result is current. `--until` is
    refused for jobs that follow each other, since Snakemake would run only the first ones.
    """
    if workflow.dag_settings.rerun_triggers != {RerunTrigger.MTIME}:
        logger.info(
            "note: by its other triggers Snakemake may list a job whose result is current (`set of input files has changed`); "
            "it computes nothing then. With --rerun-triggers mtime it isn't listed"
        )
    until = [stage for stage in STAGES if getattr(rules, stage).rule.name in workflow.dag_settings.until]
    if until and (job := planner.first_following(until)):
        raise Error(
            f"--until {' '.join(until)} would end before {job.key}, which follows another {' or '.join(until)} job; name "
            f"results instead: snakemake {job.manifest}"
        )
    # Without an executor, the graph is only drawn.
    planner.write_job_files(dry_run=workflow.dryrun or workflow.executor_plugin is None)


def is_current(job):
    """Return True if a result is current; otherwise log why it is stale, and raise an error if its job could never run."""
    if not PLANS:
        return True
    with plain_errors():
        start_planning()
        for line in planner.results.log_lines(job):
            logger.info(line)
        current = planner.results.of(job).current
        if not current:
            check_before_run(job)
        return current


@cache
def target_jobs():
    """Return the jobs that this process was started to run, by rule and wildcards; none if it plans."""
    return {(target.rulename, *sorted(target.wildcards_dict.items())) for target in workflow.dag_settings.target_jobs}


def is_target(stage, wildcards):
    return (getattr(rules, stage).rule.name, *sorted(wildcards.items())) in target_jobs()


@cache
def lists_current():
    """Return True if Snakemake's graph has to hold current results that no stale job reads.

    To run stale jobs it needn't: everything that a current result is made of is current too, and thousands of results take
    seconds. The graph is whole if it is drawn, touched or divided, if Snakemake itself may find a job to run (by other triggers
    than times, or since it was killed while the job ran), and if rules of another workflow may make files that ours read.
    """
    return (
        not PLANS
        or LINKS_INPUTS
        or workflow.executor_plugin is None
        or workflow.touch
        or workflow.dag_settings.batch is not None
        or workflow.dag_settings.rerun_triggers != {RerunTrigger.MTIME}
        or any(path.is_file() for path in Path(workflow.persistence.path, "incomplete").rglob("*"))
        or not all(Path(rule.snakefile).is_relative_to(PACKAGE_ROOT) for rule in workflow.rules)
    )


def inputs_of(stage):
    """Return an input function for a stage's rule. It returns a job's file, and the inputs of the job by role.

    Inputs of a current result are marked `ancient`: their content is unchanged, however new they are. Those of a stale one
    aren't, since Snakemake runs a job after another one only if it has an input from there that isn't ancient; nor are those of a
    group's jobs in the process that runs the group, as Snakemake would omit jobs that have old results.
    """

    def inputs(wildcards):
        job = job_of(stage, wildcards)
        current = is_current(job) and not is_target(stage, wildcards)
        mark = ancient if current else str
        with plain_errors():
            read = planner.inputs(job, every=LINKS_INPUTS) if not current or lists_current() else {}
        job_file = str(planner.job_file(job))
        marked = {role: list(map(mark, paths)) for role, paths in read.items()}
        return marked | {"job": job_file if PLANS else ancient(job_file)}

    return inputs
