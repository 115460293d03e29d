"""The job graph: all jobs of a config, by stage and name, for the rules to look up."""

import json
from collections.abc import Iterable, Iterator

from snaketune.config.suggestions import unknown
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job
from snaketune.stages.plan.all_jobs import plan_jobs
from snaketune.stages.table import STAGES


class JobGraph:
    """All jobs of a config, by stage and name, and the duplicates among them.

    Attributes:
        config: the checked config.
        jobs: by stage and name.
        same_as: by manifest, the earlier job that makes the same result under another name.
    """

    def __init__(self, config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]):
        """Args: config and variants from `load`."""
        for name in config.reruns_on:
            if name not in STAGES:
                raise SnaketuneError(f"reruns_on: there is no stage {name!r}{unknown(name, STAGES)}")
        self.config = config
        self.jobs = {(job.stage, job.name): job for job in plan_jobs(config, variants)}
        self.same_as = _same(self.jobs.values())

    def job(self, stage: str, name: str) -> Job:
        """Return the job of that name; SnaketuneError if the config has none."""
        if (stage, name) not in self.jobs:
            raise SnaketuneError(
                f"the config has no {stage} job {name!r}{unknown(name, (j.name for j in self.stage(stage)))}"
            )
        return self.jobs[stage, name]

    def stage(self, stage: str) -> Iterator[Job]:
        return (job for job in self.jobs.values() if job.stage == stage)


def _same(jobs: Iterable[Job]) -> dict[str, Job]:
    """By manifest, the earlier job that makes the same result under another name. The later one waits for it and reuses it.

    Duplicates are variants of a grid that equal the run they extend, runs with equal keys, and everything made from them.
    """
    first: dict[tuple, Job] = {}
    same: dict[str, Job] = {}
    for job in jobs:
        made_from = {
            role: tuple(same.get(made.manifest, made).manifest for made in some) for role, some in job.artifacts.items()
        }
        spec, read = json.dumps(job.plain_spec, sort_keys=True), tuple(sorted((made_from | job.files).items()))
        earlier = first.setdefault((job.stage, spec, read), job)
        if earlier is not job:
            same[job.manifest] = earlier
    return same
