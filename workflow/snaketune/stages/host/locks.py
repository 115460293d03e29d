"""Locks between processes and nodes: the holder is written in the file, and the kernel releases it when the holder dies.

Advisory `flock`, coherent across nodes on NFSv4, Lustre (`-o flock`) and GPFS. filelock makes the same call, but its files
don't name their holders. On other file systems it works on its own host only, or not at all, so the holder also has a lease,
which other hosts can see (leases.py).
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from snaketune.errors import SnaketuneError
from snaketune.stages.host.leases import Lease

SECONDS_BETWEEN_TRIES = 0.5
# Errors of a file system without such locks: an NFS mount without its lock service, Lustre without `-o flock`, FUSE.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class NoLocks(OSError):
    """The file system has no flock."""


def try_lock(lock: Path) -> TextIO | None:
    """Take a lock if it is free, and return the open file, which holds it until it is closed; None if another process has it.

    Raises:
        NoLocks: the file system has none.
        SnaketuneError: the file is a link.
    """
    try:
        # A link would be followed, and its target truncated.
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SnaketuneError(f"{lock} is a link, which no stage makes; remove it, and run again") from None
        raise
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        if error.errno in NO_LOCKS:
            raise NoLocks(error.errno, error.strerror, str(lock)) from None
        raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_free(lock: Path) -> bool:
    """Whether no process holds a lock. Only reads, so that it works for locks of other users and on a full disk."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return Lease(lock).is_free()


def holder(lock: Path) -> str:
    """Return the holder of a lock that couldn't be taken."""
    leased = Lease(lock).holder()
    # The lease may be that of a dead process, and the lock held by another one since.
    return str(leased) if leased and not leased.is_dead else lock.read_text().strip() or "another process"


@contextmanager
def locked(lock: Path, what: str) -> Iterator[Lease]:
    """Hold `lock`, waiting for its present holder; the lease that is yielded shows whether it is still held."""
    logged, lease, flock = False, Lease(lock), True
    while True:
        # The holder may be removing the folder.
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = try_lock(lock)
        except NoLocks as error:
            if flock:
                problem = f"no flock in {lock.parent} ({error.strerror})"
                print(f"{problem}: using a lease that is renewed every few seconds instead", flush=True)
            file, flock = nullcontext(), False
        if file:
            if lease.take(flock=flock):
                break
            if flock:
                file.close()
        if not logged:
            print(f"waiting for {what}: in use by {holder(lock)}", flush=True)
            logged = True
        time.sleep(SECONDS_BETWEEN_TRIES)
    with file:
        lease.beat()
        try:
            yield lease
        finally:
            lease.give_back()
