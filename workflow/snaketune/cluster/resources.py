"""The resources that each job requests: its estimate, within the cluster's limits, raised after an attempt ran out of some."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from snaketune.cluster.estimates import Estimates
from snaketune.cluster.groups import GROUPS, MAX_JOBS, SHORT_MINUTES, JobGroup, can_take_turns
from snaketune.cluster.job_endings import last_ending, raise_after
from snaketune.cluster.limits import ResourceRequest, fit_to_partitions
from snaketune.cluster.site import Site
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.table import STAGES


class ResourceRequests:
    """The requests of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job], site: Site | None = None):
        """Args: site: the cluster that they are sent to; None if that is unknown or they run here."""
        self.jobs, self.site = tuple(jobs), site
        self.estimates = Estimates(self.jobs)
        self._requests: dict[tuple[str, int], ResourceRequest] = {}

    def request(self, job: Job, attempt: int = 1) -> ResourceRequest:
        """Return the job's request; SnaketuneError if it could never start."""
        known = job.manifest, attempt
        if known not in self._requests:
            group = self.groups.get(self.group(job.stage) or "")
            request = group.requests[job.manifest] if group else self._alone(job)
            if self.site and (ending := last_ending(Path(job.folder))):
                # For a group, SLURM reports what all of its jobs together had.
                total = group.total if group else request
                more = fit_to_partitions(raise_after(total, ending), self.site, job.key)
                request = share_of(request, total, more) if group else more
            self._requests[known] = request
        return self._requests[known]

    def _alone(self, job: Job) -> ResourceRequest:
        request = self.estimates.of(job)
        return fit_to_partitions(request, self.site, job.key) if self.site else request

    @cached_property
    def groups(self) -> dict[str, JobGroup]:
        """The groups that are sent as one job, by name; empty if jobs aren't sent."""
        groups: dict[str, JobGroup] = {}
        if not self.site:
            return groups
        for name in GROUPS:
            jobs = [job for job in self.jobs if STAGES[job.stage].group == name]
            if not 0 < len(jobs) <= MAX_JOBS or not (
                self.estimates.little_text if name == "data" else can_take_turns(jobs)
            ):
                continue
            try:
                group = JobGroup(jobs, self._alone, in_turn=name == "models")
            except SnaketuneError:
                # One of its jobs can never start, which is reported when that job's resources are requested.
                continue
            if group.total.runtime <= SHORT_MINUTES and self._fits(group.total):
                groups[name] = group
        return groups

    def group(self, stage: str) -> str | None:
        """Return the stage's group if it is sent as one job; None if each job is sent on its own."""
        return name if (name := STAGES[stage].group) in self.groups else None

    def _fits(self, request: ResourceRequest) -> bool:
        try:
            return fit_to_partitions(request, self.site, "") == request
        except SnaketuneError:
            return False

    def names(self, stage: str) -> tuple[str, ...]:
        """Return the names of all resources that a job of the stage may request."""
        sent = ("slurm_account", "qos") if self.site else ()
        if not STAGES[stage].gpu:
            return ("mem_mb", "runtime", "gpu", *sent)
        sent = (*sent, "gpu_model", "constraint", "gres") if self.site else ()
        return ("mem_mb", "runtime", "gpu", "nodes", "mpi", "tasks", "tasks_per_gpu", *sent)

    def resources(self, job: Job, attempt: int = 1) -> dict[str, int | str]:
        """Return the request by the names that executors use, without resources that the job doesn't need."""
        request, site = self.request(job, attempt), self.site
        resources: dict[str, int | str | None] = {
            "mem_mb": request.mem_mb,
            "runtime": request.runtime,
            "gpu": request.gpus * request.nodes,
        }
        # The numbers of a group are summed; it runs on one node anyway.
        grouped = self.group(job.stage) is not None
        if request.gpus and not grouped:
            resources["nodes"] = request.nodes
        if request.nodes > 1:
            # One task per node; the job itself calls srun.
            resources |= {"nodes": request.nodes, "mpi": "srun", "tasks": request.nodes, "tasks_per_gpu": 0}
        if site:
            resources |= {"slurm_account": site.account, "qos": site.qos}
        if site and request.gpus:
            resources |= {"gpu_model": site.gpu_model, "constraint": site.constraint}
            if site.gpus_by == "gres" or grouped or request.nodes > 1:
                # Strings aren't summed: the jobs of a group take turns on one GPU. And on several nodes each has as many, while
                # a sum could be split unevenly.
                model = f"{site.gpu_model}:" if site.gpu_model else ""
                resources |= {"gpu": 0, "gpu_model": None, "gres": f"gpu:{model}{request.gpus}"}
        return {name: value for name, value in resources.items() if value is not None}


def share_of(request: ResourceRequest, total: ResourceRequest, more: ResourceRequest) -> ResourceRequest:
    """Return a job's share of its group's total, after that was raised to `more`.

    >>> job = ResourceRequest(threads=1, mem_mb=1000, runtime=5)
    >>> total = ResourceRequest(threads=4, mem_mb=4000, runtime=20)
    >>> share_of(job, total, ResourceRequest(threads=4, mem_mb=8000, runtime=20))
    ResourceRequest(threads=1, mem_mb=2000, runtime=5, gpus=0, nodes=1)
    """
    mem_mb = request.mem_mb * more.mem_mb // total.mem_mb
    runtime = request.runtime * more.runtime // total.runtime
    return replace(request, mem_mb=max(request.mem_mb, mem_mb), runtime=max(request.runtime, runtime))
