"""Job files: all that one job is given, in results/.jobs/<stage>/<name>.json. The planner writes them, jobs read them.

A job file is the one input of its rule whose time counts. The planner sets that to now where the result is stale, and to long
before any result where it is current; so Snakemake, which compares times, runs exactly what is stale, and gives the file as its
reason. It also compares content with that of the job's last run, and leaves out what is the same: so the file of a stale job
says when it was planned, and why.
"""

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import ValidationError

from snaketune.config.base import Model
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.jobs import RESULTS
from snaketune.stages.locks import NoLocks, try_lock

JOBS = RESULTS / ".jobs"
# 2000-01-01, before any result.
LONG_AGO = 946_684_800


class JobFile(Model):
    """One job: what it makes, and from what.

    Paths are relative to the working directory.
    """

    stage: str
    out: str
    """The folder that the result is published in."""
    spec: dict[str, Any]
    inputs: dict[str, tuple[str, ...]]
    """By role: manifests of results, or files from outside."""
    code: str | None = None
    """Digest of the stage's code when the job was planned, which must still be that when it runs; none: not compared."""
    reruns_on: Literal["code", "versions"] = "code"
    """`versions`: a result that was made with other versions of the stage's libraries isn't taken."""
    operation: dict[str, Any] = {}
    """How the job runs, by keys of `Execution`."""
    tracking: Tracking = Tracking()
    """Where curves of a training go."""
    stale: tuple[str, ...] = ()
    """Why the result isn't current."""
    planned: str | None = None
    """When that was found."""


def job_file_of(stage: str, name: str, folder: Path = JOBS) -> Path:
    """Where the file of a job is.

    >>> str(job_file_of("sft", "demo")), str(job_file_of("report", ""))
    ('results/.jobs/sft/demo.json', 'results/.jobs/report.json')
    """
    return folder / (f"{stage}/{name}.json" if name else f"{stage}.json")


def read_job_file(path: Path) -> JobFile:
    """Raises SnaketuneError, with the key and what to do, if the file isn't there or doesn't fit."""
    try:
        job = JobFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SnaketuneError(
            f"{path} can't be read ({error.strerror}); snakemake -n writes the job files of a config"
        ) from None
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors())
        raise SnaketuneError(f"{path} is no job file: {found}; snakemake -n writes it anew") from None
    # Under a default storage Snakemake shows a job its files elsewhere, and looks for the outputs there (docs/platforms.md).
    root, found, _ = str(path).rpartition(f"{JOBS}/")
    if found and root.startswith(".snakemake/"):
        job = job.model_copy(update={"out": f"{root}{job.out}"})
    return job


def write_job_file(path: Path, job: JobFile, stale: Iterable[str] | None) -> None:
    """Write a job's file if its content changes, and set its time.

    Args:
        stale: why the result isn't current; None if it is.
    """
    if stale is not None:
        planned = datetime.now(UTC).isoformat()
        job = job.model_copy(update={"stale": tuple(stale), "planned": planned})
    text = json.dumps(job.model_dump(mode="json", exclude_defaults=True), indent=1, sort_keys=True) + "\n"
    try:
        # A new file, since only its owner may set the time of one.
        if not path.is_file() or path.stat().st_mtime != LONG_AGO or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text(text, encoding="utf-8")
            if stale is None:
                os.utime(partial, (LONG_AGO, LONG_AGO))
            partial.replace(path)
        if stale is not None:
            _make_older(Path(job.out) / "manifest.json", path.stat().st_mtime)
    except OSError as error:
        raise SnaketuneError(f"{path} can't be written ({error.strerror}), and each job needs its file there") from None


def _make_older(stale: Path, than: float) -> None:
    """Give a stale manifest an earlier time, if it has none: after a clock was set back, or within a tick of a coarse one."""
    if stale.is_file() and stale.stat().st_mtime >= than:
        os.utime(stale, (than - 1, than - 1))


def own_folder() -> tuple[Path, TextIO | None]:
    """Where this process may write job files: `results/.jobs`, unless another run has it, whose jobs are still to read theirs.

    Returns:
        The folder, and what holds it as long as it is open.
    """
    try:
        JOBS.mkdir(parents=True, exist_ok=True)
        lock = try_lock(JOBS / ".lock")
    except NoLocks:
        return JOBS, None
    except OSError as error:
        raise SnaketuneError(f"{JOBS} can't be written ({error.strerror}), and each job needs its file there") from None
    return (JOBS, lock) if lock else (JOBS / f".beside-{os.getpid()}", None)
