"""The end of a SLURM job: its time limit and requeue, and how the last attempt of a job ended, so that the next one requests
more of the resource that ran out, and of no other.

A job writes its SLURM number below results/.work/.slurm/ when it starts, and removes it when it is done. When the next attempt
is planned, the job's ending is queried from SLURM: a process that ran out of memory or time can't report that itself.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from snaketune.cluster.site import ResourceRequest, minutes, site_file
from snaketune.cluster.slurm import fields, megabytes, run_slurm
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.job import RESULTS

NOTES = WORK_ROOT / ".slurm"
MORE = 2
MEMORY = re.compile(rb"slurmstepd.*(?:exceeded .*memory limit|oom[-_]kill|out of memory)", re.IGNORECASE)
LAST_BYTES = 100_000


class JobEnding(NamedTuple):
    """The ending of a SLURM job: SLURM's name for it, the memory that it requested per node, and its time limit in minutes."""

    state: str
    mem_mb: int
    runtime: int


@contextmanager
def note_job_number(folder: Path) -> Iterator[None]:
    """Store the number of this SLURM job while it makes the result of `folder`; after a failure it is retained."""
    note = _note(folder)
    if number := os.environ.get("SLURM_JOB_ID"):
        note.parent.mkdir(parents=True, exist_ok=True)
        numbers = [job for job in last_numbers(folder) if job != number]
        note.write_text("\n".join([*numbers, number, ""]), encoding="utf-8")
    yield
    if number:
        note.unlink(missing_ok=True)


def last_numbers(folder: Path) -> list[str]:
    """The stored numbers of the attempts since the last success, oldest first. The jobs of a group have the same."""
    try:
        return [line for line in _note(folder).read_text(encoding="utf-8").split() if line.isdecimal()]
    except OSError:
        return []


def ending_of(number: str) -> JobEnding | None:
    """How a SLURM job ended; None if SLURM doesn't know it."""
    if record := run_slurm("scontrol", "--oneliner", "show", "job", number):
        # A task of an array may have the number of the whole array, for which SLURM lists all tasks.
        job = next((task for task in map(fields, record.splitlines()) if task.get("JobId") == number), {})
        had = fields(job.get("TRES", "").replace(",", " "))
        memory, nodes = had.get("mem", "0"), int(had.get("node", "1"))
        state, limit = job.get("JobState", ""), job.get("TimeLimit", "")
        if state in ("FAILED", "CANCELLED") and _ran_out_of_memory(Path(job.get("StdOut", ""))):
            state = "OUT_OF_MEMORY"
    else:
        record = run_slurm("sacct", "-j", number, "-X", "-n", "-P", "-o", "JobIDRaw,State,ReqMem,Timelimit") or ""
        records = {number: rest for number, *rest in (line.split("|") for line in record.splitlines())}
        if number not in records:
            return None
        (state, memory, limit), nodes = records[number], 1
    runtime = minutes(limit)
    # `CANCELLED by 1000` counts as one state.
    return JobEnding(
        state=state.partition(" ")[0],
        mem_mb=megabytes(memory) // max(1, nodes),
        runtime=runtime if isinstance(runtime, int) else 0,
    )


def unfinished(folders: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each result whose last attempt didn't finish in its SLURM job: how that job ended, and the log."""
    endings: dict[str, JobEnding | None] = {}
    for folder in folders:
        for number in last_numbers(folder)[-1:]:
            if number not in endings:
                endings[number] = ending_of(number)
            state = ending.state if (ending := endings[number]) else "no longer known to SLURM"
            name = folder.relative_to(RESULTS) if folder.is_relative_to(RESULTS) else folder
            yield f"{name}: SLURM job {number} is {state}; its log: {RESULTS}/logs/{name}.log"


def _ran_out_of_memory(log: Path) -> bool:
    """Whether a job's log reports a memory limit: if the kernel didn't kill the process, SLURM reports it only there."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            return MEMORY.search(file.read()) is not None
    except OSError:
        return False


def raise_after(request: ResourceRequest, ending: JobEnding | None) -> ResourceRequest:
    """The request of the next attempt: twice the memory or time if the last one ran out of it.

    >>> request = ResourceRequest(threads=1, mem_mb=1500, runtime=10)
    >>> raise_after(request, JobEnding(state="OUT_OF_MEMORY", mem_mb=1500, runtime=10))
    ResourceRequest(threads=1, mem_mb=3000, runtime=10, gpus=0, nodes=1)
    >>> raise_after(request, JobEnding(state="FAILED", mem_mb=1500, runtime=10)) == request
    True
    """
    if ending and ending.state == "OUT_OF_MEMORY":
        return replace(request, mem_mb=max(request.mem_mb, MORE * ending.mem_mb))
    if ending and ending.state == "TIMEOUT":
        return replace(request, runtime=max(request.runtime, MORE * ending.runtime))
    return request


def _note(folder: Path) -> Path:
    return NOTES / (folder.relative_to(RESULTS) if folder.is_relative_to(RESULTS) else folder.name)


def job_end_time() -> float | None:
    """When SLURM ends this job, in seconds since the epoch; None outside of SLURM, or if it doesn't report it."""
    number = os.environ.get("SLURM_JOB_ID")
    if not number:
        return None
    # squeue first: the time limit may have been extended since the job started.
    reported = (run_slurm("squeue", "--noheader", "--job", number, "--format=%e") or "").strip()
    with suppress(ValueError):
        return datetime.fromisoformat(reported).timestamp()
    # Set by newer versions; the executor removes most of SLURM's variables from a job's step.
    reported = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(reported) if reported.isdecimal() else None


def seconds_until(end: float | None) -> float:
    return float("inf") if end is None else end - time.time()


def requeue_job() -> bool:
    """Requeue this job: SLURM ends it and starts it again, after about two minutes.

    Return False if SLURM refuses, or if Snakemake itself runs in this job: it would find its own lock when it starts again.
    """
    if site_file() is None:
        return False
    return run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"]) is not None
