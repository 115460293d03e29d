"""The `convert` jobs, which follow from `gguf:` and the trained models."""

from collections.abc import Iterable, Iterator

from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job
from snaketune.stages.specs import ConvertSpec


def convert_jobs(config: Workflow, jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the job of each entry of `gguf:`."""
    models = {f"{job.stage}:{job.name}": job for job in jobs}
    for name, gguf in config.gguf.items():
        artifacts = {"model": (models[gguf.model],)}
        yield Job(stage="convert", name=name, spec=ConvertSpec(type=gguf.type), artifacts=artifacts)
