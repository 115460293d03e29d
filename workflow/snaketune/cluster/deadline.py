"""When a job of the cluster has to end, and how it gets another one."""

import os
import time
from contextlib import suppress
from datetime import datetime

from snaketune.cluster.site import site_file
from snaketune.cluster.slurm import run_slurm


def job_end_time() -> float | None:
    """When SLURM ends this job, in seconds since the epoch; None where nothing does, or it doesn't say."""
    number = os.environ.get("SLURM_JOB_ID")
    if not number:
        return None
    # Somebody may have given it more time since it began.
    said = (run_slurm("squeue", "--noheader", "--job", number, "--format=%e") or "").strip()
    with suppress(ValueError):
        return datetime.fromisoformat(said).timestamp()
    # Of newer versions; the executor takes most of SLURM's variables away from a job's step.
    told = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(told) if told.isdecimal() else None


def seconds_until(end: float | None) -> float:
    """Infinitely many where there is no end."""
    return float("inf") if end is None else end - time.time()


def requeue_job() -> bool:
    """Put this job back into the queue: SLURM ends it and starts it again, after about two minutes.

    False if it refuses, or the job is the user's own, in which Snakemake itself runs: it would find its own lock again.
    """
    if site_file() is None:
        return False
    return run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"]) is not None
