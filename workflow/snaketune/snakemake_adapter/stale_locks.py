"""Snakemake's lock of the working directory, after a Snakemake that was killed there: it is removed, instead of asking for
`snakemake --unlock`.

Snakemake's lock files don't say who wrote them. A run also holds the lock of the job files until its process ends, which does.
"""

from pathlib import Path

from snakemake.logging import logger

from snaketune.stages.host.locks import holder, is_free
from snaketune.stages.job_files import JOBS, LOCK

# What `snakemake --unlock` removes.
SNAKEMAKE_LOCKS = Path(".snakemake/locks")


def remove_stale_locks() -> None:
    """Remove Snakemake's locks if the run that took them is dead. Called before a run locks the job files."""
    locks, job_files = list(SNAKEMAKE_LOCKS.glob("*.lock")), JOBS / LOCK
    if locks and job_files.is_file() and is_free(job_files):
        for lock in locks:
            lock.unlink()
        logger.info(f"Snakemake was killed here ({holder(job_files)}): its lock of this directory is removed")
