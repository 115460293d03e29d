"""Single jobs with job files like those that the planner writes."""

import sys
from pathlib import Path
from typing import Any

from snaketune.stages.job_files import JobFile, write_job_file


def job_of(stage: str, spec: dict[str, Any], inputs: dict[str, Any], out: str, **operation: Any) -> JobFile:
    """Return a job. Args: inputs: by role, one path or several; operation: keys of `Execution`."""
    paths = {role: tuple(map(str, one if isinstance(one, list | tuple) else [one])) for role, one in inputs.items()}
    return JobFile(stage=stage, spec=spec, inputs=paths, out=out, operation=operation)


def job_command(job: JobFile, folder: Path) -> list[str]:
    """Write the file of a job beside its result in `folder`, and return the command that runs it."""
    path = folder / f"{job.out}.json"
    write_job_file(path, job, None)
    return [sys.executable, "-m", "snaketune", job.stage, str(path.absolute())]
