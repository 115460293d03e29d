"""What rules ask of the scheduler, which jobs are sent to a cluster as one, and why those that were sent wait."""

from snaketune.cluster.pending_jobs import watch
from snaketune.cluster.resources import ResourceRequests
from snaketune.cluster.site import read_site, site_file

with plain_errors():
    requests = ResourceRequests(graph.jobs.values(), read_site(site_file()) if site_file() else None)


def threads_of(stage):
    """CPUs of a job, on each of its nodes."""

    def threads(wildcards):
        return request_of(stage, wildcards).threads

    return threads


def resource_of(stage, name):
    """What a job of the stage needs of one resource: memory in MB, minutes, GPUs on all its nodes."""

    def resource(wildcards, attempt):
        # A resource that is None isn't there.
        return requests.resources(job_of(stage, wildcards), attempt).get(name)

    return resource


def cluster_resources_of(stage):
    """On a cluster: where a job goes, in whose name, and what a GPU is called there."""
    return {name: resource_of(stage, name) for name in requests.names(stage) if name not in ("mem_mb", "runtime", "gpu")}


def request_of(stage, wildcards):
    """What a job asks for; refused where it could never start."""
    with plain_errors():
        return requests.request(job_of(stage, wildcards))


def group_of(stage):
    """The jobs that are sent to a cluster as one."""

    def group(wildcards):
        return requests.group(stage)

    return group


onstart:
    # Whoever waits for hours shouldn't have to wonder why. Jobs that are sent somewhere run without hooks.
    if not workflow.local_exec:
        watch(logger.info)
