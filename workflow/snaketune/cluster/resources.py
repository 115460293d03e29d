"""The resources that each job requests: its estimate, within the cluster's limits, raised after an attempt ran out of some.

Short jobs are sent to a cluster in groups, since each job waits in the queue and starts Snakemake twice. A group's job runs the
others in the order of their dependencies. It requests the sum of the resources of jobs that run in parallel, for the largest
such level, and the time of all levels in sequence.

    data      corpora, tokenizers, tokens, plans and rows, those of one level in parallel; `pack` jobs run where Snakemake runs
    models    trainings, reference passes and evaluations, one after the other on one GPU; several groups of an hour each if
              they take longer

A group must not wait for a job that waits for the group. So jobs below a job that is sent on its own, or in another group, are
in a further group, `models2` for example.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

from snaketune.cluster.estimates import Estimates
from snaketune.cluster.job_endings import ending_of, last_numbers, raise_after
from snaketune.cluster.site import ResourceRequest, Site, fit_to_partitions
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.table import STAGES

# The most minutes that a group may take, and the most jobs it may have: Snakemake compares the jobs of a group with each other.
SHORT_MINUTES, MAX_JOBS = 60, 100
# The part of a short job's estimate that jobs which run one after the other in a group don't need each.
SPARE_MINUTES = 4
# The resource of which jobs that run one after the other take one, and a group's job has one.
TURN = "turn"


class JobGroup(NamedTuple):
    """What the jobs of a group request, by manifest, and the level of each: jobs of one level run in parallel, after others."""

    requests: dict[str, ResourceRequest]
    level_of: dict[str, int]

    def total(self, names: Iterable[str] = ()) -> ResourceRequest:
        """What Snakemake requests for these jobs, sent as one job; by default for all."""
        levels: dict[int, list[ResourceRequest]] = {}
        for name in names or self.requests:
            levels.setdefault(self.level_of[name], []).append(self.requests[name])
        return ResourceRequest(
            threads=max(sum(request.threads for request in level) for level in levels.values()),
            mem_mb=max(sum(request.mem_mb for request in level) for level in levels.values()),
            runtime=sum(max(request.runtime for request in level) for level in levels.values()),
            gpus=max(request.gpus for level in levels.values() for request in level),
            nodes=max(request.nodes for level in levels.values() for request in level),
        )


class ResourceRequests:
    """The requests of all jobs of a graph."""

    def __init__(self, jobs: Iterable[Job], site: Site | None = None, runs: Callable[[Job], bool] = lambda job: True):
        """Args: site: the cluster that they are sent to; None if unknown or if they run here. runs: whether a job will run;
        others aren't part of a group. It is first called when a group is looked up."""
        self.jobs, self.site, self.runs = tuple(jobs), site, runs
        self.estimates = Estimates(self.jobs)
        self._requests: dict[tuple[str, int], ResourceRequest] = {}

    def request(self, job: Job, attempt: int = 1) -> ResourceRequest:
        """The job's request; SnaketuneError if it could never start."""
        known = job.manifest, attempt
        if known not in self._requests:
            group = self.groups.get(self.group(job) or "")
            group = group or JobGroup({job.manifest: self.alone(job)}, {job.manifest: 0})
            requests = self._raised(group, job.key) if self.site else group.requests
            self._requests |= {(manifest, attempt): request for manifest, request in requests.items()}
        return self._requests[known]

    def _raised(self, group: JobGroup, key: str) -> dict[str, ResourceRequest]:
        """The requests of jobs that are sent as one, more of what an attempt ran out of. Args: key: for errors."""
        assert self.site is not None
        requests = dict(group.requests)
        attempts: dict[str, list[str]] = {}
        for manifest in requests:
            for number in last_numbers(Path(manifest).parent):
                attempts.setdefault(number, []).append(manifest)
        for number, manifests in attempts.items():
            # SLURM reports what all jobs of the attempt had together, which may have been a part of this group.
            together = JobGroup(requests, group.level_of).total(manifests)
            more = raise_after(together, ending_of(number))
            requests |= {manifest: scaled(requests[manifest], together, more) for manifest in manifests}
        together = JobGroup(requests, group.level_of).total()
        fitting = fit_to_partitions(together, self.site, key)
        return {manifest: scaled(request, together, fitting) for manifest, request in requests.items()}

    def summary(self, jobs: Iterable[Job]) -> str:
        """A table of what jobs take at most, by stage and in all, one after the other: time and GPU time in hours, the memory
        of the largest job, and disk space, with the checkpoints of one job at a time. It ends with a note if there is less."""
        by_stage: dict[str, list[Job]] = {}
        for job in jobs:
            by_stage.setdefault(job.stage, []).append(job)
        together = [job for stage in by_stage.values() for job in stage]
        lines, disk = [f"{'stage':<12}{'jobs':>6}{'hours':>9}{'GPU hours':>11}{'memory GB':>11}{'disk GB':>9}"], 0.0
        for stage, alike in [*by_stage.items(), ("in all", together)]:
            requests = [self.alone(job) for job in alike]
            results, checkpoints = zip(*map(self.estimates.disk, alike))
            disk = (sum(results) + max(checkpoints)) / 1e9
            minutes = sum(request.runtime for request in requests)
            gpu_minutes = sum(request.runtime * request.gpus * request.nodes for request in requests)
            memory = max(request.mem_mb for request in requests) / 1000
            hours = f"{minutes / 60:>9.1f}{gpu_minutes / 60:>11.1f}"
            lines.append(f"{stage:<12}{len(requests):>6}{hours}{memory:>11.1f}{disk:>9.1f}")
        if disk > (free := disk_usage(".").free / 1e9):
            lines.append(f"note: {free:.1f} GB of disk space are free here")
        return "\n".join(lines)

    def alone(self, job: Job) -> ResourceRequest:
        """What the job would request if it were sent on its own; SnaketuneError if it could never start."""
        request = self.estimates.of(job)
        return fit_to_partitions(request, self.site, job.key) if self.site else request

    def threads(self, job: Job) -> int:
        """The CPUs that the job uses on each node, alone or in a group: results on a CPU depend on them."""
        return self.alone(job).threads

    @cached_property
    def groups(self) -> dict[str, JobGroup]:
        """The groups that are sent as one job, by name; empty if jobs aren't sent."""
        found: dict[str, list[JobGroup]] = {"data": [], "models": []}
        if self.site:
            for jobs in self._parts("data"):
                found["data"] += self._group(jobs, in_turn=False)
            for jobs in self._parts("models"):
                found["models"] += self._hours(jobs)
        return {
            name if number == 1 else f"{name}{number}": group
            for name, groups in found.items()
            for number, group in enumerate(groups, 1)
        }

    def _hours(self, jobs: list[Job]) -> list[JobGroup]:
        """Groups of at most an hour, in the order of planning: each waits only for its own and earlier groups' jobs."""
        groups: list[JobGroup] = []
        members: list[Job] = []
        for job in jobs:
            if members and not self._group([*members, job], in_turn=True):
                groups += self._group(members, in_turn=True)
                members = []
            members.append(job)
        return groups + self._group(members, in_turn=True)

    def _parts(self, name: str) -> list[list[Job]]:
        """The jobs that may be sent as the group, in parts: no job of a part waits for another one by way of a job that
        isn't of the group."""
        parts: dict[str, int] = {}

        def part_of(job: Job) -> int:
            """The part of a job of the group; of another job, the part of a job that waits for it."""
            if job.manifest not in parts:
                above = [parent for parent in _above(job).values() if self.runs(parent)]
                leaves = not self._may_join(job, name)
                parts[job.manifest] = max(
                    (part_of(parent) + (leaves and self._may_join(parent, name)) for parent in above), default=0
                )
            return parts[job.manifest]

        found: dict[int, list[Job]] = {}
        for job in self.jobs:
            if self.runs(job) and self._may_join(job, name):
                found.setdefault(part_of(job), []).append(job)
        return [found[part] for part in sorted(found)]

    def _may_join(self, job: Job, name: str) -> bool:
        if STAGES[job.stage].group != name:
            return False
        if name == "data":
            return self.estimates.little_text
        # A job that can never start is reported when its resources are requested.
        return (job.operation.gpus, job.operation.nodes) == (1, 1) and self.estimates.of(job).runtime <= SHORT_MINUTES

    def _group(self, jobs: list[Job], in_turn: bool) -> list[JobGroup]:
        """A group; nothing if it isn't short or doesn't fit in one partition. Args: in_turn: whether its jobs run one
        after the other."""
        if len(jobs) > MAX_JOBS or self.site is None:
            return []
        try:
            requests = {job.manifest: self.alone(job) for job in jobs}
            group = _in_turn(requests) if in_turn else JobGroup(requests, _levels(jobs))
            fits = fit_to_partitions(group.total(), self.site, "") == group.total()
        except SnaketuneError:
            return []
        return [group] if fits and group.total().runtime <= SHORT_MINUTES else []

    @cached_property
    def _group_names(self) -> dict[str, str]:
        return {manifest: name for name, group in self.groups.items() for manifest in group.requests}

    def group(self, job: Job) -> str | None:
        """The name of the group that the job is sent in; None if it is sent on its own."""
        return self._group_names.get(job.manifest)

    def submissions(self, stages: Collection[str]) -> dict[str, Job]:
        """One job of each that is sent, by name: of a group, of an array, or the job itself; empty if jobs aren't sent.
        Args: stages: those whose jobs are sent."""
        sent = (job for job in self.jobs if self.site and job.stage in stages and self.runs(job))
        return {self.group(job) or (job.stage if STAGES[job.stage].array else job.key): job for job in sent}

    def names(self, stage: str) -> tuple[str, ...]:
        """The names of all resources that a job of the stage may request."""
        names = ("mem_mb", "runtime", "gpu")
        sent: tuple[str, ...] = ("slurm_account", "qos")
        if STAGES[stage].group == "models":
            sent += (TURN,)
        if STAGES[stage].gpu:
            names += ("nodes", "mpi", "tasks", "tasks_per_gpu")
            sent += ("gpu_model", "constraint", "gres")
        return names + sent if self.site else names

    def resources(self, job: Job, attempt: int = 1) -> dict[str, int | str]:
        """The request by the names that executors use, without resources that the job doesn't need."""
        return self._by_name(job, self.request(job, attempt))

    def submitted(self, job: Job) -> tuple[int, dict[str, int | str]]:
        """The CPUs and resources with which the job is first submitted: those of its whole group if it has one."""
        name = self.group(job)
        request = self.groups[name].total() if name else self.request(job)
        return request.threads, self._by_name(job, request)

    def _by_name(self, job: Job, request: ResourceRequest) -> dict[str, int | str]:
        site, gpus, nodes = self.site, request.gpus, request.nodes
        resources: dict[str, int | str | None] = {
            "mem_mb": request.mem_mb,
            "runtime": request.runtime,
            "gpu": gpus * nodes,
        }
        # The numbers of a group are summed; it runs on one node anyway.
        grouped = self.group(job) is not None
        if gpus and not grouped:
            resources["nodes"] = nodes
        if nodes > 1:
            # One task per node; the job itself calls srun.
            resources |= {"nodes": nodes, "mpi": "srun", "tasks": nodes, "tasks_per_gpu": 0}
        if site:
            resources |= {"slurm_account": site.account, "qos": site.qos}
            if STAGES[job.stage].group == "models":
                resources[TURN] = 1
        if site and gpus:
            resources |= {"gpu_model": site.gpu_model, "constraint": site.constraint}
            if site.gpus_by == "gres" or grouped or nodes > 1:
                # Strings aren't summed, so a group has one GPU. And on several nodes each has as many, while
                # a sum could be split unevenly.
                model = f"{site.gpu_model}:" if site.gpu_model else ""
                resources |= {"gpu": 0, "gpu_model": None, "gres": f"gpu:{model}{gpus}"}
        return {name: value for name, value in resources.items() if value is not None}


def _above(job: Job) -> dict[str, Job]:
    """The jobs that a job waits for, by manifest."""
    return {
        dependency.manifest: dependency
        for dependency in [*(parent for parents in job.artifacts.values() for parent in parents), *job.after]
    }


def _levels(jobs: list[Job]) -> dict[str, int]:
    """The level of each job: after those that it is made from. Jobs come after those that they are made from."""
    level_of: dict[str, int] = {}
    for job in jobs:
        made_from = (parent.manifest for parents in job.artifacts.values() for parent in parents)
        level_of[job.manifest] = 1 + max(
            (level_of[manifest] for manifest in made_from if manifest in level_of), default=-1
        )
    return level_of


def _in_turn(requests: dict[str, ResourceRequest]) -> JobGroup:
    """A group whose jobs run one after the other. The longest keeps all of its time, which they share."""
    longest = max(requests, key=lambda name: requests[name].runtime)
    shorter = {
        name: replace(request, runtime=max(1, request.runtime - SPARE_MINUTES)) for name, request in requests.items()
    }
    shorter[longest] = requests[longest]
    return JobGroup(shorter, {name: level for level, name in enumerate(shorter)})


def scaled(request: ResourceRequest, total: ResourceRequest, changed: ResourceRequest) -> ResourceRequest:
    """A job's share of its group's total, after that was changed.

    Shares of a larger total are rounded up, since it is needed, and those of a smaller one down, since it is a limit.

    >>> job = ResourceRequest(threads=1, mem_mb=1000, runtime=5)
    >>> total = ResourceRequest(threads=4, mem_mb=4000, runtime=20)
    >>> scaled(job, total, ResourceRequest(threads=4, mem_mb=8000, runtime=19))
    ResourceRequest(threads=1, mem_mb=2000, runtime=4, gpus=0, nodes=1)
    >>> scaled(job, total, ResourceRequest(threads=4, mem_mb=8000, runtime=21)).runtime
    6
    """

    def share(amount: int, all_jobs: int, changed_all: int) -> int:
        exact = amount * changed_all / all_jobs
        return math.ceil(exact) if changed_all > all_jobs else max(1, math.floor(exact))

    return replace(
        request,
        mem_mb=share(request.mem_mb, total.mem_mb, changed.mem_mb),
        runtime=share(request.runtime, total.runtime, changed.runtime),
    )
