"""Locks between processes and nodes: who holds one is written in it, and the kernel frees it when the holder dies.

Advisory `flock`, coherent across nodes on NFSv4, Lustre (`-o flock`) and GPFS. filelock's is the same call, but its files can't
tell who holds them.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SECONDS_BETWEEN_TRIES = 0.5


def try_lock(lock: Path) -> TextIO | None:
    """Take a lock if it is free: the open file, which holds it until it is closed; None if somebody else has it."""
    file = lock.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_free(lock: Path) -> bool:
    """Whether nobody holds a lock; only looked at, so that a lock of somebody else's may be asked for, and on a full disk."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def holder(lock: Path) -> str:
    """Who holds a lock that couldn't be taken."""
    return lock.read_text().strip() or "another process"


@contextmanager
def locked(lock: Path, what: str) -> Iterator[None]:
    """Hold `lock`, waiting for whoever holds it."""
    told = False
    while True:
        # Whoever holds it may be removing the folder.
        lock.parent.mkdir(parents=True, exist_ok=True)
        if file := try_lock(lock):
            break
        if not told:
            print(f"waiting for {what}: in use by {holder(lock)}", flush=True)
            told = True
        time.sleep(SECONDS_BETWEEN_TRIES)
    with file:
        yield
