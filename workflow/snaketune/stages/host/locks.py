"""Locks between processes and nodes: leases of `filelock`, which only need a file system that all hosts share.

A lock is a file that names the process that holds it, which touches it every few seconds. The lock of a process of this machine
that has ended is taken over at once, that of another machine once nothing has touched it for LEASE_SECONDS. Code that holds the
GIL for longer than that looks dead: another host may take the folder over, and the work since the last checkpoint is lost, but
nothing is written twice.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease, Timeout

from snaketune.errors import SnaketuneError

SECONDS_BETWEEN_TRIES = 0.5
SECONDS_BETWEEN_BEATS = 5.0
# NFS clients may show a file as it was up to 60 s ago (acregmax); a lease older than this has missed six more heartbeats.
LEASE_SECONDS = 90.0


@contextmanager
def locked(lock: Path, what: str) -> Iterator[SoftFileLease]:
    """Hold `lock`, waiting for its present holder. The process ends if the lease is lost."""
    lease = _lease(lock, on_lost=_end_process)
    try:
        lease.acquire(blocking=False)
    except Timeout:
        print(f"waiting for {what}: in use by {holder(lock)}", flush=True)
        lease.acquire(poll_interval=SECONDS_BETWEEN_TRIES)
    try:
        yield lease
    finally:
        lease.release()


def take(lock: Path) -> SoftFileLease | None:
    """Take a lock if it is free, to be released by the caller; None if another process has it."""
    lease = _lease(lock)
    try:
        lease.acquire(blocking=False)
    except Timeout:
        return None
    return lease


def _lease(lock: Path, on_lost: Callable[[str], None] = lambda problem: None) -> SoftFileLease:
    """The lease of a lock, not taken yet; SnaketuneError if its file is a link, which would be waited for.

    Args:
        on_lost: called with a message, in another thread, when the lease is lost.
    """
    # The holder may be removing the folder.
    lock.parent.mkdir(parents=True, exist_ok=True)
    if lock.is_symlink():
        raise SnaketuneError(f"{lock} is a link, which no stage makes; remove it, and run again")
    return SoftFileLease(
        lock,
        lease_duration=LEASE_SECONDS,
        heartbeat_interval=SECONDS_BETWEEN_BEATS,
        on_compromise=lambda compromise: on_lost(_lost(lock)),
    )


def check_held(lease: SoftFileLease) -> None:
    """Raise SnaketuneError if a lease is lost; called before anything is written that another process might write."""
    if not lease.is_lock_held_by_us:
        raise SnaketuneError(_lost(Path(lease.lock_file)))


def is_free(lock: Path) -> bool:
    """Whether no live process seems to have a lock; reads only, so that it works on a full disk."""
    return not lock.exists() or time.time() - lock.stat().st_mtime > LEASE_SECONDS


def holder(lock: Path) -> str:
    owner = SoftFileLease(lock, lease_duration=LEASE_SECONDS).owner
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "another process"


def _lost(lock: Path) -> str:
    if not lock.exists():
        return (
            f"{lock} no longer exists: it or a folder above it was renamed, moved or removed while this process worked "
            "there, so this process writes nothing more. Move it back, unless it was removed, and run again; work "
            "resumes from the last checkpoint"
        )
    return (
        f"{lock.parent} was taken over by {holder(lock)} (this process sent no heartbeat for {LEASE_SECONDS:.0f} s), so this "
        "process writes nothing more. The other one resumes from the last checkpoint"
    )


def _end_process(message: str) -> None:
    """End this process at once, since its further writes would mix with another process's files."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
