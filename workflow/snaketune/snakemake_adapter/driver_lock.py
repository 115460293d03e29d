"""Snakemake's lock of the working directory, after a Snakemake that was killed there: it is removed, instead of asking for
`snakemake --unlock`.

Snakemake's lock files don't say who wrote them. So each run also holds a lock that does, and that is taken over from a process
that has died: at once on this host, after 90 seconds without a sign of life on another one.
"""

import atexit
from pathlib import Path

from snakemake.logging import logger

from snaketune.stages.host.locks import holder, take

DRIVER_LOCK = Path(".snakemake/driver.lock")
# What `snakemake --unlock` removes.
SNAKEMAKE_LOCKS = Path(".snakemake/locks")


def take_driver_lock() -> None:
    """Hold the lock until this process ends, and remove Snakemake's locks of a run that was killed; nothing if another run has
    it."""
    killed = holder(DRIVER_LOCK) if DRIVER_LOCK.exists() else ""
    lease = take(DRIVER_LOCK)
    if lease is None:
        return
    atexit.register(lease.release)
    locks = list(SNAKEMAKE_LOCKS.glob("*.lock"))
    if killed and locks:
        for lock in locks:
            lock.unlink()
        logger.info(f"Snakemake was killed here ({killed}): its lock of this directory is removed")
