"""The time limit of the present SLURM job, and its requeue."""

import os
import time
from contextlib import suppress
from datetime import datetime

from snaketune.cluster.site import site_file
from snaketune.cluster.slurm import run_slurm


def job_end_time() -> float | None:
    """Return when SLURM ends this job, in seconds since the epoch; None outside of SLURM, or if it doesn't report it."""
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
    """Return the seconds until `end`; infinity if it is None."""
    return float("inf") if end is None else end - time.time()


def requeue_job() -> bool:
    """Requeue this job: SLURM ends it and starts it again, after about two minutes.

    Return False if SLURM refuses, or if Snakemake itself runs in this job: it would find its own lock when it starts again.
    """
    if site_file() is None:
        return False
    return run_slurm("scontrol", "requeue", os.environ["SLURM_JOB_ID"]) is not None
