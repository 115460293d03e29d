"""Which jobs are sent to a cluster as one: those that are short, since each that is sent waits, and starts Snakemake twice.

It runs the jobs of such a group in the order in which they depend on each other, those of one level side by side, and asks for
the sum of a level, of the widest one, and for the time of all levels after each other.

    data      corpora, tokenizers, tokens, plans and rows; what gathers them is done where Snakemake runs
    models    trainings, reference passes and evaluations, on one GPU that they take in turn
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from snaketune.cluster.limits import ResourceRequest
from snaketune.stages.job import Job

GROUPS = ("data", "models")
# Minutes up to which jobs are short, all in all, and how many there may be: Snakemake compares those of a group with each
# other.
SHORT_MINUTES, MAX_JOBS = 60, 100


class JobGroup:
    """The jobs of one group, were they sent as one.

    Attributes:
        asks: by manifest, what each asks for, so that the sum is right.
        whole: what Snakemake then asks for.
    """

    def __init__(self, jobs: Iterable[Job], estimated: Callable[[Job], ResourceRequest], in_turn: bool):
        """Args: in_turn: whether those of one level take turns, and share the threads of one."""
        jobs = list(jobs)
        levels = _levels(jobs)
        widths = Counter(levels.values())
        self.requests = {}
        for job in jobs:
            ask = estimated(job)
            if in_turn:
                turns = widths[levels[job.manifest]]
                threads = max(1, ask.threads // max(widths.values()))
                ask = replace(ask, runtime=ask.runtime * turns, threads=threads)
            self.requests[job.manifest] = ask
        sums = [[self.requests[name] for name, level in levels.items() if level == one] for one in widths]
        self.total = ResourceRequest(
            threads=max(sum(ask.threads for ask in level) for level in sums),
            mem_mb=max(sum(ask.mem_mb for ask in level) for level in sums),
            runtime=sum(max(ask.runtime for ask in level) for level in sums),
            gpus=max(ask.gpus for level in sums for ask in level),
        )


def can_take_turns(jobs: Iterable[Job]) -> bool:
    """Whether they can take turns on one GPU, or all do without."""
    needed = {(job.operation.gpus, job.operation.nodes) for job in jobs}
    return len(needed) == 1 and needed <= {(0, 1), (1, 1)}


def _levels(jobs: list[Job]) -> dict[str, int]:
    """By manifest, how many others have to be made before, one after the other; jobs stand behind what they are made from."""
    levels: dict[str, int] = {}
    for job in jobs:
        before = (levels[made.manifest] for some in job.artifacts.values() for made in some if made.manifest in levels)
        levels[job.manifest] = 1 + max(before, default=-1)
    return levels
