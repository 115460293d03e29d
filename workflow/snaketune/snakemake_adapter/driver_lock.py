"""Snakemake's lock of the working directory, after a Snakemake that was killed there: it is removed, instead of asking for
`snakemake --unlock`.

Snakemake's lock files don't say who wrote them. So each run also holds a flock, which the kernel releases when its process
ends; the file names the process and its host. Locks from another host stay, since not every file system has flock across hosts.
"""

import socket
from pathlib import Path
from typing import TextIO

from snakemake.logging import logger

from snaketune.stages.host.locks import NoLocks, try_lock

DRIVER_LOCK = Path(".snakemake/driver.lock")
# What `snakemake --unlock` removes.
SNAKEMAKE_LOCKS = Path(".snakemake/locks")


def take_driver_lock() -> TextIO | None:
    """Take the flock, which is held until the returned file is closed, and remove locks of a run that was killed on this host.

    None if another run has it, or the file system has no flock.
    """
    try:
        holder = DRIVER_LOCK.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        holder = ""
    try:
        file = try_lock(DRIVER_LOCK)
    except NoLocks:
        return None
    locks = list(SNAKEMAKE_LOCKS.glob("*.lock"))
    if file and locks and holder.endswith(f" on {socket.gethostname()}"):
        for lock in locks:
            lock.unlink()
        logger.info(f"Snakemake was killed here ({holder}): its lock of this directory is removed")
    return file
