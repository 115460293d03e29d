"""Single jobs with job files like those that the planner writes, and the chain of data jobs."""

import sys
from pathlib import Path
from typing import Any

from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job_files import JobFile, write_job_file

ROW_LENGTH = 1024


def job_of(stage: str, spec: dict[str, Any], inputs: dict[str, Any], out: str, **operation: Any) -> JobFile:
    """Return a job. Args: inputs: by role, one path or several; operation: keys of `Execution`."""
    paths = {role: tuple(map(str, one if isinstance(one, list | tuple) else [one])) for role, one in inputs.items()}
    return JobFile(stage=stage, spec=spec, inputs=paths, out=out, operation=operation)


def job_command(job: JobFile, folder: Path) -> list[str]:
    """Write the file of a job beside its result in `folder`, and return the command that runs it."""
    path = folder / f"{job.out}.json"
    write_job_file(path, job, None)
    return [sys.executable, "-m", "snaketune", job.stage, str(path.absolute())]


def started(folder: Path | str) -> WorkFolder:
    """Return a work folder in which a stage's `build` can begin."""
    work = WorkFolder(Path(folder))
    work.start()
    return work


def data_jobs(
    files: list[Path],
    tokenizer: Path,
    *,
    length: int = ROW_LENGTH,
    held_out: float = 0,
    overflow: str = "truncate",
    parts: int = 1,
) -> list[JobFile]:
    """Return the jobs from raw conversations to shards, with results below the working directory; the last is `pack`.

    Args:
        tokenizer: manifest.
        parts: of `tokenize` and of `write`.
    """

    def manifest(name: str) -> Path:
        return Path(name, "manifest.json")

    numbers = range(1, parts + 1)
    corpus = {"kind": "conversations", "sources": [{"files": [str(file) for file in files]}], "held_out": held_out}
    plan = {"kind": "sft", "lengths": [length], "strategy": "best-fit-decreasing", "overflow": overflow}
    encoded = {"corpus": manifest("corpus"), "tokenizer": tokenizer}
    tokens, shards = ([manifest(f"{name}-{k}") for k in numbers] for name in ("tokens", "shards"))
    planned = {"plan": manifest("plan"), "tokens": tokens, "corpus": []}
    return [
        job_of("corpus", corpus, {"files": files}, "corpus"),
        *(
            job_of(
                "tokenize", {"kind": "sft", "train_on": "assistant", "part": k, "parts": parts}, encoded, f"tokens-{k}"
            )
            for k in numbers
        ),
        job_of("plan", plan, {"tokens": tokens}, "plan"),
        *(job_of("write", {"part": k, "parts": parts}, planned, f"shards-{k}") for k in numbers),
        job_of(
            "pack",
            {"kind": "sft", "length": length, "overflow": overflow},
            {"plan": manifest("plan"), "shards": shards},
            "pack",
        ),
    ]
