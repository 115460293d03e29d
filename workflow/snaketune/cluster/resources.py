"""What each job asks of the scheduler: what its work needs, within the cluster's partitions; more where it ran out before."""

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
    """Of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job], site: Site | None = None):
        """Args: site: the cluster that they are sent to; None where that isn't known, or they aren't sent anywhere."""
        self.jobs, self.site = tuple(jobs), site
        self.estimates = Estimates(self.jobs)
        self._requests: dict[tuple[str, int], ResourceRequest] = {}

    def request(self, job: Job, attempt: int = 1) -> ResourceRequest:
        """Raises SnaketuneError if the job can never start there."""
        known = job.manifest, attempt
        if known not in self._requests:
            group = self.groups.get(self.group(job.stage) or "")
            found = group.requests[job.manifest] if group else self._alone(job)
            if self.site and (end := last_ending(Path(job.folder))):
                # What SLURM tells of a group is what all of its jobs together had.
                whole = group.total if group else found
                more = fit_to_partitions(raise_after(whole, end), self.site, job.key)
                found = share_of(found, whole, more) if group else more
            self._requests[known] = found
        return self._requests[known]

    def _alone(self, job: Job) -> ResourceRequest:
        ask = self.estimates.of(job)
        return fit_to_partitions(ask, self.site, job.key) if self.site else ask

    @cached_property
    def groups(self) -> dict[str, JobGroup]:
        """By name, the groups that are sent as one job; none where jobs aren't sent."""
        found: dict[str, JobGroup] = {}
        if not self.site:
            return found
        for name in GROUPS:
            jobs = [job for job in self.jobs if STAGES[job.stage].group == name]
            if not 0 < len(jobs) <= MAX_JOBS or not (self.estimates.little_text if name == "data" else can_take_turns(jobs)):
                continue
            try:
                group = JobGroup(jobs, self._alone, in_turn=name == "models")
            except SnaketuneError:
                # One of them can never start, which is told where it is asked for.
                continue
            if group.total.runtime <= SHORT_MINUTES and self._fits(group.total):
                found[name] = group
        return found

    def group(self, stage: str) -> str | None:
        """The group whose jobs are one job of the cluster; None for jobs of their own."""
        return name if (name := STAGES[stage].group) in self.groups else None

    def _fits(self, ask: ResourceRequest) -> bool:
        try:
            return fit_to_partitions(ask, self.site, "") == ask
        except SnaketuneError:
            return False

    def names(self, stage: str) -> tuple[str, ...]:
        """Of all resources that a job of the stage may ask for."""
        sent = ("slurm_account", "qos") if self.site else ()
        if not STAGES[stage].gpu:
            return ("mem_mb", "runtime", "gpu", *sent)
        sent = (*sent, "gpu_model", "constraint", "gres") if self.site else ()
        return ("mem_mb", "runtime", "gpu", "nodes", "mpi", "tasks", "tasks_per_gpu", *sent)

    def resources(self, job: Job, attempt: int = 1) -> dict[str, int | str]:
        """By the names that executors know; what a job doesn't ask for isn't there."""
        ask, site = self.request(job, attempt), self.site
        found: dict[str, int | str | None] = {"mem_mb": ask.mem_mb, "runtime": ask.runtime, "gpu": ask.gpus * ask.nodes}
        # A group's numbers are summed; it is on one node by itself.
        grouped = self.group(job.stage) is not None
        if ask.gpus and not grouped:
            found["nodes"] = ask.nodes
        if ask.nodes > 1:
            # One task for each node, and the job itself calls srun.
            found |= {"nodes": ask.nodes, "mpi": "srun", "tasks": ask.nodes, "tasks_per_gpu": 0}
        if site:
            found |= {"slurm_account": site.account, "qos": site.qos}
        if site and ask.gpus:
            found |= {"gpu_model": site.gpu_model, "constraint": site.constraint}
            if site.gpus_by == "gres" or grouped or ask.nodes > 1:
                # Words aren't summed: the jobs of a group take turns on one GPU. And of several nodes each has as many, where a
                # sum could be shared out otherwise.
                model = f"{site.gpu_model}:" if site.gpu_model else ""
                found |= {"gpu": 0, "gpu_model": None, "gres": f"gpu:{model}{ask.gpus}"}
        return {name: value for name, value in found.items() if value is not None}


def share_of(ask: ResourceRequest, whole: ResourceRequest, more: ResourceRequest) -> ResourceRequest:
    """A job's share of what its group asks for, where that asks for more now.

    >>> job = ResourceRequest(threads=1, mem_mb=1000, runtime=5)
    >>> whole = ResourceRequest(threads=4, mem_mb=4000, runtime=20)
    >>> share_of(job, whole, ResourceRequest(threads=4, mem_mb=8000, runtime=20))
    Ask(threads=1, mem_mb=2000, runtime=5, gpus=0, nodes=1)
    """
    mem_mb, runtime = ask.mem_mb * more.mem_mb // whole.mem_mb, ask.runtime * more.runtime // whole.runtime
    return replace(ask, mem_mb=max(ask.mem_mb, mem_mb), runtime=max(ask.runtime, runtime))
