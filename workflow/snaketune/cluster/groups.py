"""Groups of short jobs that are sent to a cluster as one job, since each job waits in the queue and starts Snakemake twice.

Such a job runs the jobs of its group in the order of their dependencies, those of one level in parallel. It requests the sum of
the resources of a level, for the largest level, and the time of all levels in sequence.

    data      corpora, tokenizers, tokens, plans and rows; the `pack` jobs run where Snakemake runs
    models    trainings, reference passes and evaluations, which take turns on one GPU
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from snaketune.cluster.limits import ResourceRequest
from snaketune.stages.job import Job

GROUPS = ("data", "models")
# The most minutes that a group may take, and the most jobs it may have: Snakemake compares the jobs of a group with each other.
SHORT_MINUTES, MAX_JOBS = 60, 100


class JobGroup:
    """The jobs of one group, and what they request if sent as one.

    Attributes:
        requests: by manifest, the request of each job, such that their sum is right.
        total: what Snakemake then requests.
    """

    def __init__(self, jobs: Iterable[Job], estimated: Callable[[Job], ResourceRequest], in_turn: bool):
        """Args: in_turn: whether the jobs of one level take turns, and share the threads of one."""
        jobs = list(jobs)
        levels = _levels(jobs)
        widths = Counter(levels.values())
        self.requests = {}
        for job in jobs:
            request = estimated(job)
            if in_turn:
                turns = widths[levels[job.manifest]]
                threads = max(1, request.threads // max(widths.values()))
                request = replace(request, runtime=request.runtime * turns, threads=threads)
            self.requests[job.manifest] = request
        sums = [[self.requests[name] for name, level in levels.items() if level == one] for one in widths]
        self.total = ResourceRequest(
            threads=max(sum(one.threads for one in level) for level in sums),
            mem_mb=max(sum(one.mem_mb for one in level) for level in sums),
            runtime=sum(max(one.runtime for one in level) for level in sums),
            gpus=max(one.gpus for level in sums for one in level),
        )


def can_take_turns(jobs: Iterable[Job]) -> bool:
    """Return True if the jobs can take turns on one GPU, or none needs a GPU."""
    needed = {(job.operation.gpus, job.operation.nodes) for job in jobs}
    return len(needed) == 1 and needed <= {(0, 1), (1, 1)}


def _levels(jobs: list[Job]) -> dict[str, int]:
    """Return by manifest the number of levels below each job. `jobs` has each job after those that it is made from."""
    levels: dict[str, int] = {}
    for job in jobs:
        before = (levels[made.manifest] for some in job.artifacts.values() for made in some if made.manifest in levels)
        levels[job.manifest] = 1 + max(before, default=-1)
    return levels
