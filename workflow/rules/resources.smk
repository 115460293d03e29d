"""The resources that rules request from the scheduler, the groups of jobs sent as one, the log of why jobs are pending, and the
process whose forks run jobs on this machine."""

from snaketune.cluster.pending_jobs import watch
from snaketune.cluster.resources import ResourceRequests
from snaketune.cluster.site import read_site, site_file
from snaketune.stages.host.forks import fork_jobs

with plain_errors():
    requests = ResourceRequests(graph.jobs.values(), read_site(site_file()) if site_file() else None)


def threads_of(stage):
    """Return a function for the CPUs of a job, per node; an error if it could never start."""

    def threads(wildcards):
        with plain_errors():
            return requests.request(job_of(stage, wildcards)).threads

    return threads


def resource_of(stage, name):
    """Return a function for one resource of a job: memory in MB, minutes, or GPUs on all its nodes; None if it needs none."""
    return lambda wildcards, attempt: requests.resources(job_of(stage, wildcards), attempt).get(name)


def resources_of(stage):
    """Return the functions of all resources of a stage's jobs; on a cluster also account, partition options and GPU model."""
    return {name: resource_of(stage, name) for name in requests.names(stage)}


def group_of(stage):
    """Return a function for the group whose jobs are sent to a cluster as one job."""
    return lambda wildcards: requests.group(stage)


onstart:
    # Jobs may wait for hours, so the reasons are logged. Processes that run single jobs on a cluster don't run hooks.
    if not workflow.local_exec:
        watch(logger.info)
    elif planner.computes() and not DEPLOYS:
        fork_jobs(PREFIX, [stage for stage in STAGES if STAGES[stage].gpu], Path("results/logs/forks.log"))
