"""Job files: everything that a job is given, in results/.jobs/<stage>/<name>.json. The planner writes them, jobs read them.

The planner sets a file's time to now if the job's result is stale, and to before any result if it is current. Snakemake
compares times, so it runs exactly the stale jobs and names the file as the reason. It also compares content with that of the
job's last run and skips inputs with the same content, so the file of a stale job also records when it was planned and why.

A run may take days, and its jobs read their files when they start; so do the worker processes of a training, which refuse a
file that changed since (`stages.loaded_job`). So a dry run changes nothing that a job reads, and a second run that would is
refused.
"""

import atexit
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from snaketune.artifacts.manifest import read_json
from snaketune.config.base import Model
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.host.locks import Lease, take
from snaketune.stages.job import RESULTS

JOBS = RESULTS / ".jobs"
# Files of jobs that a dry run plans differently: a run in progress may still read the files of the last run.
DRY_RUN = JOBS / ".dry-run"
LOCK = ".lock"
# What stores said of remote files when jobs were planned.
KNOWN = JOBS / ".remote.json"
# The reason of a job that the command line forces: it computes, though its result exists.
FORCED = "forced"
# 2000-01-01, before any result.
LONG_AGO = 946_684_800
# Locks that this process holds until it ends.
_held: list[AbstractContextManager[Any]] = []


class JobFile(Model):
    """One job: its stage, spec, inputs and output folder. Paths are relative to the working directory."""

    stage: str
    out: str  # the folder that the result is published in
    spec: dict[str, Any]
    inputs: dict[str, tuple[str, ...]]  # by role: manifests of results, or external files
    # By URL, the identity of each remote file when the job was planned, which must be unchanged when it runs.
    remote: dict[str, str] = {}
    # Digest of the stage's code when the job was planned, which must be unchanged when it runs; None: not compared.
    code: str | None = None
    # `versions`: a result made with other versions of the stage's libraries isn't reused.
    reruns_on: Literal["code", "versions"] = "code"
    operation: dict[str, Any] = {}  # how the job runs, by keys of `Execution`
    tracking: Tracking = Tracking()  # where the curves of a training are sent
    stale: tuple[str, ...] = ()  # why the result isn't current
    planned: str | None = None  # when the result was found stale, in ISO 8601


def job_file_of(stage: str, name: str, folder: Path = JOBS) -> Path:
    """The path of a job's file.

    >>> str(job_file_of("sft", "demo")), str(job_file_of("report", ""))
    ('results/.jobs/sft/demo.json', 'results/.jobs/report.json')
    """
    return folder / (f"{stage}/{name}.json" if name else f"{stage}.json")


def read_job_file(path: Path) -> JobFile:
    """Read a job's file; SnaketuneError, with the key and what to do, if it is missing or invalid."""
    try:
        job = JobFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SnaketuneError(
            f"{path} can't be read ({error.strerror}); `snakemake -n` writes the job files of a config"
        ) from None
    except ValidationError as error:
        raise SnaketuneError(f"{path} is no job file: {issues_of(error)}; `snakemake -n` writes a new one") from None
    # With a default storage, Snakemake keeps a job's files in another folder and expects the outputs there (docs/platforms.md).
    root, separator, _ = str(path).rpartition(f"{JOBS}/")
    if separator and root.startswith(".snakemake/"):
        job = job.model_copy(update={"out": f"{root}{job.out}"})
    return job


def issues_of(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors())


def write_job_file(
    path: Path, job: JobFile, stale: Iterable[str] | None, *, keep_time: bool = False, keep_content: bool = False
) -> bool:
    """Write a job's file unless it is up to date, and set its time.

    Args:
        stale: why the result isn't current; None if it is.
        keep_time: don't touch the file of a stale job if it already records that; a run in progress may need its time.
        keep_content: write nothing if that would change what a job reads.
    Returns:
        False if the content was kept.
    """
    content = job.model_dump(mode="json", exclude_defaults=True)
    manifest = Path(job.out) / "manifest.json"
    with _writing(path):
        existing, changed = read_json(path, {}), changed_at(path)
        planned = existing.pop("planned", None)
        if keep_content and changed >= 0 and {k: v for k, v in existing.items() if k != "stale"} != content:
            return False
        if stale is None:
            if existing == content and changed == LONG_AGO:
                return True
        else:
            content["stale"] = list(stale)
            if keep_time and planned and existing == content and changed > changed_at(manifest):
                return True
            content["planned"] = datetime.now(UTC).isoformat()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file, since only its owner may set the time of an existing one.
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if stale is None:
            os.utime(partial, (LONG_AGO, LONG_AGO))
        partial.replace(path)
        # The clock was set back, or both were written within one tick of a coarse clock.
        if stale is not None and changed_at(manifest) >= changed_at(path):
            os.utime(manifest, (changed_at(path) - 1,) * 2)
        return True


def lock_job_files() -> bool:
    """Lock the job files until this process ends. Return False if another run holds them."""
    lease = Lease(JOBS / LOCK)
    with _writing(JOBS):
        if not (file := take(JOBS / LOCK, lease)):
            return False
    _held.append(file)
    lease.beat(on_lost=lambda lost: None)
    atexit.register(lease.give_back)
    return True


def changed_at(path: Path) -> float:
    """When a file was changed; -1 if it doesn't exist."""
    return path.stat().st_mtime if path.is_file() else -1.0


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise SnaketuneError for an OSError while `path` is written."""
    try:
        yield
    except FileExistsError as error:
        raise SnaketuneError(f"{error.filename} is no folder, but job files are stored there; remove it") from None
    except OSError as error:
        raise SnaketuneError(f"{path} can't be written ({error.strerror}), but each job needs its job file") from None
