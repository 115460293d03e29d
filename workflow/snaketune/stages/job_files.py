"""Job files: all that one job is given, in results/.jobs/<stage>/<name>.json. The planner writes them, jobs read them.

The planner sets a file's time to now where the job's result is stale, and to long before any result where it is current; so
Snakemake, which compares times, runs exactly what is stale, and gives the file as its reason. It also compares content with
that of the job's last run, and leaves out what is the same: so the file of a stale job says when it was planned, and why.

A run may go on for days, and its jobs read their files when they begin. So a dry run changes nothing that a job reads, and a
second run is refused where it would.
"""

import atexit
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
from snaketune.stages.host.leases import Lease
from snaketune.stages.host.locks import NoLocks, try_lock
from snaketune.stages.job import RESULTS

JOBS = RESULTS / ".jobs"
# Of jobs that a dry run plans otherwise than the last run: what runs may still read the files of that one.
DRY_RUN = JOBS / ".dry-run"
LOCK = ".lock"
# 2000-01-01, before any result.
LONG_AGO = 946_684_800
# Locks that this process holds until it ends.
_held: list[TextIO] = []


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


def write_job_file(path: Path, job: JobFile, stale: Iterable[str] | None, *, keep_time: bool = False) -> None:
    """Write a job's file, unless it is there as it should be, and set its time.

    Args:
        stale: why the result isn't current; None if it is.
        keep_time: leave the file of a stale job as it is where it says so already: a run beside this one may need its time.
    """
    content = job.model_dump(mode="json", exclude_defaults=True)
    manifest = Path(job.out) / "manifest.json"
    try:
        there, changed = _content_of(path), _time(path)
        if stale is None:
            if there == content and changed == LONG_AGO:
                return
        else:
            content["stale"] = list(stale)
            planned = there.pop("planned", None)
            if keep_time and planned and there == content and changed > _time(manifest):
                return
            content["planned"] = datetime.now(UTC).isoformat()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: only its owner may set the time of one.
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if stale is None:
            os.utime(partial, (LONG_AGO, LONG_AGO))
        partial.replace(path)
        # After a clock was set back, or within one tick of a coarse clock.
        if stale is not None and _time(manifest) >= _time(path):
            os.utime(manifest, (_time(path) - 1,) * 2)
    except FileExistsError as error:
        raise SnaketuneError(f"{error.filename} is no folder, and job files have to be there; remove it") from None
    except OSError as error:
        raise SnaketuneError(f"{path} can't be written ({error.strerror}), and each job needs its file there") from None


def is_unchanged(path: Path, job: JobFile) -> bool:
    """Whether writing the job's file would change nothing that a job reads, or there is no file yet."""
    there = _content_of(path)
    return not path.exists() or _planned(there) == _planned(job.model_dump(mode="json", exclude_defaults=True))


def lock_job_files() -> bool:
    """Whether no other run has the job files; this one has them from now on, until its process ends."""
    try:
        JOBS.mkdir(parents=True, exist_ok=True)
        lock = try_lock(JOBS / LOCK)
        if lock is None:
            return False
        _held.append(lock)
        flock = True
    except NoLocks:
        flock = False
    except FileExistsError:
        raise SnaketuneError(f"{JOBS} is no folder, and job files have to be there; remove it") from None
    except OSError as error:
        raise SnaketuneError(f"{JOBS} can't be written ({error.strerror}), and each job needs its file there") from None
    # Other hosts may not know of the lock.
    lease = Lease(JOBS / LOCK)
    if not lease.take(flock=flock):
        return False
    lease.beat(on_lost=lambda lost: None)
    atexit.register(lease.give_back)
    return True


def _content_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _planned(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in ("stale", "planned")}


def _time(path: Path) -> float:
    """When a file was changed; before all time where it isn't there."""
    return path.stat().st_mtime if path.is_file() else -1.0
