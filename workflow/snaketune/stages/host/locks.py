"""Locks between processes and nodes: who holds one is written in it, and the kernel frees it when the holder dies.

Advisory `flock`, coherent across nodes on NFSv4, Lustre (`-o flock`) and GPFS. filelock's is the same call, but its files can't
tell who holds them. Elsewhere it holds on its own host alone, or isn't there at all; so who works has a lease besides, which
other hosts can see (leases.py).
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
# What a file system says that has no such locks: an NFS mount without its lock service, Lustre without `-o flock`, FUSE.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class NoLocks(OSError):
    """The file system has no flock."""


def try_lock(lock: Path) -> TextIO | None:
    """Take a lock if it is free: the open file, which holds it until it is closed; None if somebody else has it.

    Raises:
        NoLocks: there are none in this place.
        SnaketuneError: it is a link.
    """
    try:
        # A link in its place would be followed, and what it leads to emptied.
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
    """Whether nobody holds a lock; only looked at, so that a lock of somebody else's may be asked for, and on a full disk."""
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
    """Who holds a lock that couldn't be taken."""
    leased = Lease(lock).holder()
    # A lease may be a dead process's, and the lock another one's since.
    return str(leased) if leased and not leased.is_dead else lock.read_text().strip() or "another process"


@contextmanager
def locked(lock: Path, what: str) -> Iterator[Lease]:
    """Hold `lock`, waiting for whoever holds it; inside, the lease tells whether it is still held."""
    told, lease, flock = False, Lease(lock), True
    while True:
        # Whoever holds it may be removing the folder.
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = try_lock(lock)
        except NoLocks as error:
            if flock:
                told_of = f"no flock in {lock.parent} ({error.strerror})"
                print(f"{told_of}: a lease that is renewed every few seconds stands for it", flush=True)
            file, flock = nullcontext(), False
        if file:
            if lease.take(flock=flock):
                break
            if flock:
                file.close()
        if not told:
            print(f"waiting for {what}: in use by {holder(lock)}", flush=True)
            told = True
        time.sleep(SECONDS_BETWEEN_TRIES)
    with file:
        lease.beat()
        try:
            yield lease
        finally:
            lease.give_back()
