"""The resources that rules request from the scheduler, the groups of jobs sent as one, and the log of why jobs are pending."""

import atexit
import shutil
import sys
from pathlib import Path

from snaketune.cluster.job_endings import unfinished
from snaketune.cluster.pending_jobs import watch
from snaketune.cluster import sbatch
from snaketune.cluster.resources import MAX_JOBS, TURN, ResourceRequests
from snaketune.cluster.site import read_site, site_file
from snaketune.cluster.submission_check import check, wait_for_controller

with plain_errors():
    requests = ResourceRequests(
        graph.jobs.values(),
        read_site(site_file()) if site_file() else None,
        # Processes that run single jobs don't know what else runs.
        runs=lambda job: not PLANS or job.manifest in outputs_of_this_run(),
    )
# The stages whose jobs are sent.
SENT = set()
ON_SLURM = bool(PLANS and requests.site and shutil.which("sbatch"))


@cache
def outputs_of_this_run():
    """Return the files that will be made. Snakemake knows them when its graph is complete, before it looks up groups."""
    return {str(path) for job in workflow.dag.needrun_jobs() for path in job.output}


@cache
def check_submissions():
    """Raise an error if SLURM would refuse anything that this run sends; tell Snakemake to send groups whole."""
    # By default, Snakemake sends only jobs as one that depend on each other.
    components = workflow.group_settings.group_components
    workflow.group_settings.group_components = {**components, **dict.fromkeys(requests.groups, MAX_JOBS)}
    if ON_SLURM:
        # `local_exec` is also true of a dry run.
        check(requests, requests.submissions(SENT), logger, waits=not workflow.local_exec)


def threads_of(stage):
    """Return a function for the CPUs of a job, per node; an error if it could never start."""

    def threads(wildcards):
        with plain_errors():
            return requests.threads(job_of(stage, wildcards))

    return threads


def resource_of(stage, name):
    """Return a function for one resource of a job: memory in MB, minutes, or GPUs on all its nodes; None if it needs none."""

    def resource(wildcards, attempt):
        # Snakemake calls this also right before it submits a job.
        if ON_SLURM and not workflow.local_exec:
            wait_for_controller(logger.warning)
        return requests.resources(job_of(stage, wildcards), attempt).get(name)

    return resource


def resources_of(stage):
    """Return the functions of all resources of a stage's jobs; on a cluster also account, partition options and GPU model."""
    return {name: resource_of(stage, name) for name in requests.names(stage)}


def group_of(stage):
    """Return a function for the group whose jobs are sent to a cluster as one job. Every rule whose jobs are sent has one."""
    SENT.add(stage)

    def group(wildcards):
        with plain_errors():
            check_submissions()
            return requests.group(job_of(stage, wildcards))

    return group


# In a group's job, trainings and evaluations run one after the other. Each group's job has one turn.
if requests.site:
    workflow.register_resource(TURN, 1)


resource_scopes:
    turn="local",


@atexit.register
def print_submissions():
    """Print how many SLURM jobs a dry run would submit. Snakemake has no hook for the end of one."""
    if workflow.dryrun and workflow.dag and (names := sorted(requests.submissions(SENT))):
        print(f"As {len(names)} SLURM jobs: {', '.join(names)}.", file=sys.stderr)


onerror:
    if ON_SLURM:
        for line in unfinished(Path(job.folder) for job in graph.jobs.values()):
            logger.error(line)


onstart:
    # Jobs may wait for hours, so the reasons are logged. Processes that run single jobs on a cluster don't run hooks.
    if not workflow.local_exec:
        watch(logger.info)
        if ON_SLURM:
            sbatch.install(logger.warning)
