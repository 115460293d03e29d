"""How the last attempt of a job ended, so that the next one asks for more of what it ran out of, and of nothing else.

A job notes its number below results/.work/.slurm/ when it begins and takes the note away when it is done. Whoever plans the
next attempt asks SLURM how that one ended: a process that ran out of memory or time can't say so itself.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from snaketune.cluster.limits import ResourceRequest
from snaketune.cluster.site import minutes
from snaketune.cluster.slurm import fields, megabytes, run_slurm
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.job import RESULTS

NOTES = WORK_ROOT / ".slurm"
MORE = 2
MEMORY = re.compile(rb"slurmstepd.*(?:exceeded .*memory limit|oom[-_]kill|out of memory)", re.IGNORECASE)
LAST_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class JobEnding:
    """How a job of SLURM ended.

    Attributes:
        state: as SLURM names it, such as OUT_OF_MEMORY.
        mem_mb, runtime: what it had asked for, on each node; minutes.
    """

    state: str
    mem_mb: int
    runtime: int


@contextmanager
def note_job_number(folder: Path) -> Iterator[None]:
    """While a job of SLURM makes the result that is published in `folder`, its number is noted, and if it fails, left."""
    number = os.environ.get("SLURM_JOB_ID")
    if not number:
        yield
        return
    note = _note(folder)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{number}\n", encoding="utf-8")
    yield
    note.unlink(missing_ok=True)


def last_ending(folder: Path) -> JobEnding | None:
    """How the last attempt ended that left a note; None where there is none, or SLURM doesn't know."""
    try:
        number = _note(folder).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if not number.isdecimal():
        return None
    if told := run_slurm("scontrol", "--oneliner", "show", "job", number):
        # One of an array's tasks has the number of the array itself, of which SLURM tells all.
        records = [fields(line) for line in told.splitlines()]
        found = next((one for one in records if one.get("JobId") == number), {})
        had = fields(found.get("TRES", "").replace(",", " "))
        memory, nodes = had.get("mem", "0"), int(had.get("node", "1"))
        state, limit = found.get("JobState", ""), found.get("TimeLimit", "")
        if state in ("FAILED", "CANCELLED") and _ran_out_of_memory(Path(found.get("StdOut", ""))):
            state = "OUT_OF_MEMORY"
    elif told := run_slurm("sacct", "-j", number, "-X", "-n", "-P", "-o", "JobIDRaw,State,ReqMem,Timelimit"):
        records = {number: rest for number, *rest in (line.split("|") for line in told.splitlines())}
        if number not in records:
            return None
        state, memory, limit, nodes = *records[number], 1
    else:
        return None
    runtime = minutes(limit)
    # `CANCELLED by 1000` is one state.
    return JobEnding(
        state=state.split()[0] if state else "",
        mem_mb=megabytes(memory) // max(1, nodes),
        runtime=runtime if isinstance(runtime, int) else 0,
    )


def _ran_out_of_memory(log: Path) -> bool:
    """Where it isn't the kernel that ends such a job, SLURM tells so in the job's log alone."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            return MEMORY.search(file.read()) is not None
    except OSError:
        return False


def raise_after(ask: ResourceRequest, end: JobEnding | None) -> ResourceRequest:
    """The ask of the attempt after one that ended so.

    >>> ask = ResourceRequest(threads=1, mem_mb=1500, runtime=10)
    >>> raise_after(ask, JobEnding(state="OUT_OF_MEMORY", mem_mb=1500, runtime=10))
    Ask(threads=1, mem_mb=3000, runtime=10, gpus=0, nodes=1)
    >>> raise_after(ask, JobEnding(state="FAILED", mem_mb=1500, runtime=10)) == ask
    True
    """
    if end and end.state == "OUT_OF_MEMORY":
        return replace(ask, mem_mb=max(ask.mem_mb, MORE * end.mem_mb))
    if end and end.state == "TIMEOUT":
        return replace(ask, runtime=max(ask.runtime, MORE * end.runtime))
    return ask


def _note(folder: Path) -> Path:
    return NOTES / folder.relative_to(RESULTS) if folder.is_relative_to(RESULTS) else NOTES / folder.name
