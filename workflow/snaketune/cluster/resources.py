"""The resources that each job requests: its estimate, within the cluster's limits, raised after an attempt ran out of some.

Short jobs are sent to a cluster in groups, since each job waits in the queue and starts Snakemake twice. A group's job runs the
others in the order of their dependencies, those of one level in parallel. It requests the sum of the resources of a level, for
the largest level, and the time of all levels in sequence.

    data      corpora, tokenizers, tokens, plans and rows; the `pack` jobs run where Snakemake runs
    models    trainings, reference passes and evaluations, which take turns on one GPU
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from snaketune.cluster.estimates import Estimates
from snaketune.cluster.job_endings import last_ending, raise_after
from snaketune.cluster.site import ResourceRequest, Site, fit_to_partitions
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.table import STAGES

# The most minutes that a group may take, and the most jobs it may have: Snakemake compares the jobs of a group with each other.
SHORT_MINUTES, MAX_JOBS = 60, 100


class JobGroup(NamedTuple):
    """What the jobs of a group request by manifest, such that their sum is right; and what Snakemake then requests."""

    requests: dict[str, ResourceRequest]
    total: ResourceRequest


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
            group = self.groups.get(STAGES[job.stage].group or "")
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
        made = {name: self._group(name) for name in ("data", "models")} if self.site else {}
        return {name: group for name, group in made.items() if group}

    def _group(self, name: str) -> JobGroup | None:
        """Return a group; None if it isn't short, can't take turns on one GPU, or doesn't fit in one partition."""
        in_turn = name == "models"
        jobs = [job for job in self.jobs if STAGES[job.stage].group == name]
        needed = {(job.operation.gpus, job.operation.nodes) for job in jobs}
        is_short = needed in ({(0, 1)}, {(1, 1)}) if in_turn else self.estimates.little_text
        if not 0 < len(jobs) <= MAX_JOBS or not is_short:
            return None
        try:
            group = _grouped(jobs, {job.manifest: self._alone(job) for job in jobs}, in_turn)
            fits = fit_to_partitions(group.total, self.site, "") == group.total
        except SnaketuneError:
            # One of its jobs can never start, which is reported when that job's resources are requested.
            return None
        return group if fits and group.total.runtime <= SHORT_MINUTES else None

    def group(self, stage: str) -> str | None:
        """Return the stage's group if it is sent as one job; None if each job is sent on its own."""
        return name if (name := STAGES[stage].group) in self.groups else None

    def names(self, stage: str) -> tuple[str, ...]:
        """Return the names of all resources that a job of the stage may request."""
        names = ("mem_mb", "runtime", "gpu")
        sent: tuple[str, ...] = ("slurm_account", "qos")
        if STAGES[stage].gpu:
            names += ("nodes", "mpi", "tasks", "tasks_per_gpu")
            sent += ("gpu_model", "constraint", "gres")
        return names + sent if self.site else names

    def resources(self, job: Job, attempt: int = 1) -> dict[str, int | str]:
        """Return the request by the names that executors use, without resources that the job doesn't need."""
        return self._by_name(job, self.request(job, attempt))

    def submitted(self, job: Job, attempt: int = 1) -> tuple[int, dict[str, int | str]]:
        """Return the CPUs and resources with which the job is submitted: those of its whole group if it has one."""
        name = self.group(job.stage)
        request = self.groups[name].total if name else self.request(job, attempt)
        return request.threads, self._by_name(job, request)

    def _by_name(self, job: Job, request: ResourceRequest) -> dict[str, int | str]:
        site, gpus, nodes = self.site, request.gpus, request.nodes
        resources: dict[str, int | str | None] = {
            "mem_mb": request.mem_mb,
            "runtime": request.runtime,
            "gpu": gpus * nodes,
        }
        # The numbers of a group are summed; it runs on one node anyway.
        grouped = self.group(job.stage) is not None
        if gpus and not grouped:
            resources["nodes"] = nodes
        if nodes > 1:
            # One task per node; the job itself calls srun.
            resources |= {"nodes": nodes, "mpi": "srun", "tasks": nodes, "tasks_per_gpu": 0}
        if site:
            resources |= {"slurm_account": site.account, "qos": site.qos}
        if site and gpus:
            resources |= {"gpu_model": site.gpu_model, "constraint": site.constraint}
            if site.gpus_by == "gres" or grouped or nodes > 1:
                # Strings aren't summed: the jobs of a group take turns on one GPU. And on several nodes each has as many, while
                # a sum could be split unevenly.
                model = f"{site.gpu_model}:" if site.gpu_model else ""
                resources |= {"gpu": 0, "gpu_model": None, "gres": f"gpu:{model}{gpus}"}
        return {name: value for name, value in resources.items() if value is not None}


def _grouped(jobs: list[Job], requests: dict[str, ResourceRequest], in_turn: bool) -> JobGroup:
    """Return the group of some jobs, each after those that it is made from, with their own requests. Args: in_turn: whether the
    jobs of a level take turns, and share the threads of one."""
    level_of: dict[str, int] = {}
    for job in jobs:
        made_from = (made.manifest for some in job.artifacts.values() for made in some)
        level_of[job.manifest] = 1 + max((level_of[made] for made in made_from if made in level_of), default=-1)
    widths = Counter(level_of.values())
    if in_turn:
        requests = {
            name: replace(
                one,
                runtime=one.runtime * widths[level_of[name]],
                threads=max(1, one.threads // max(widths.values())),
            )
            for name, one in requests.items()
        }
    levels = [[requests[name] for name in requests if level_of[name] == level] for level in widths]
    total = ResourceRequest(
        threads=max(sum(one.threads for one in level) for level in levels),
        mem_mb=max(sum(one.mem_mb for one in level) for level in levels),
        runtime=sum(max(one.runtime for one in level) for level in levels),
        gpus=max(one.gpus for one in requests.values()),
    )
    return JobGroup(requests, total)


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
