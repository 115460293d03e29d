"""Locks between processes and nodes: `flock`, and a lease that other hosts can see.

    <lock>          locked by flock; names the last process that had it
    <lock>.lease    {"host", "process", "boot", "token", "job"}; its time of modification is the last heartbeat

`flock` is immediate, is never lost to a process that is merely slow, and the kernel releases it when its holder dies. NFSv4,
Lustre (`-o flock`) and GPFS have it across nodes, other file systems within one host only, or not at all. So a process that has
the lock also takes a lease and waits for those of other hosts; without flock, the lease is the only lock. All times are by the
file system's clock. Code that holds the GIL for longer than DEAD_SECONDS looks dead: another host may take the folder over,
and the work since the last checkpoint is lost, but nothing is written twice.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from snaketune.errors import SnaketuneError

SECONDS_BETWEEN_TRIES = 0.5
SECONDS_BETWEEN_BEATS = 5.0
# NFS clients may show a file as it was up to 60 s ago (acregmax); a lease older than this has missed six more heartbeats.
DEAD_SECONDS = 90.0
# After an outage of the file server all leases look dead, so a lease is watched for two heartbeats before it is taken over.
WATCHED_SECONDS = 2 * SECONDS_BETWEEN_BEATS
# A process that takes over a dead lease waits this long for others that do so too; the last one to write has it.
SETTLING_SECONDS = 2.0
# Errors of a file system without flock: an NFS mount without its lock service, Lustre without `-o flock`, FUSE.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class NoLocks(OSError):
    """The file system has no flock."""


@contextmanager
def locked(lock: Path, what: str) -> Iterator["Lease"]:
    """Hold `lock`, waiting for its present holder; the lease that is yielded shows whether it is still held."""
    logged, lease = False, Lease(lock)
    while not (file := take(lock, lease)):
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


def take(lock: Path, lease: "Lease") -> AbstractContextManager[Any] | None:
    """Take a lock and its lease if both are free, and return what holds the lock until it is closed; otherwise None."""
    # The holder may be removing the folder.
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = try_lock(lock)
    except NoLocks as error:
        if lease.flock:
            problem = f"no flock in {lock.parent} ({error.strerror})"
            print(f"{problem}: using a lease that is renewed every few seconds instead", flush=True)
        file, lease.flock = nullcontext(), False
    if file and not lease.take(flock=lease.flock):
        with file:
            return None
    return file


def try_lock(lock: Path) -> TextIO | None:
    """Take a lock if it is free, and return the open file, which holds it until it is closed; None if another process has it.

    Raises NoLocks if the file system has none, and SnaketuneError if the file is a link.
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
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            return None
        if error.errno in NO_LOCKS:
            raise NoLocks(error.errno, error.strerror, str(lock)) from None
        raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def is_free(lock: Path) -> bool:
    """Whether no process holds a lock. Only reads, so that it works for locks of other users and on a full disk."""
    has_flock = True
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            has_flock = False
    return Lease(lock).is_free(flock=has_flock)


def holder(lock: Path) -> str:
    return str(Lease(lock).holder() or lock.read_text().strip() or "another process")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        boot: id of the machine's boot; empty without /proc, as on macOS. Another machine may have the same name.
        token: unique id of this lease.
        job: number of its SLURM job; empty outside of SLURM.
    """

    host: str
    process: int
    boot: str
    token: str
    job: str = ""

    @classmethod
    def here(cls) -> "Holder":
        """This process, with a new token."""
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        job, token = os.environ.get("SLURM_JOB_ID", ""), uuid.uuid4().hex
        return cls(host=socket.gethostname(), process=os.getpid(), boot=boot, token=token, job=job)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + (f" (SLURM job {self.job})" if self.job else "")


def end_process(message: str) -> None:
    """End this process at once, since its further writes would mix with another process's files."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Lease:
    """One lock's lease file, as one process sees it."""

    def __init__(self, lock: Path):
        self.path = lock.with_name(f"{lock.name}.lease")
        self.this_process = Holder.here()
        self._partial = lock.with_name(f".{self.path.name}.{self.this_process.token}")
        self._ended = threading.Event()
        # Whether the lock's file system has flock, as far as is known.
        self.flock = True
        # The last heartbeat seen of another holder, and since when it is unchanged.
        self._seen: tuple[Holder | None, float] = None, 0.0
        self._since = 0.0

    def take(self, *, flock: bool) -> bool:
        """Take the lease unless a live process has it.

        Args:
            flock: whether this process holds the lock that the lease belongs to, so no other process on this machine does.
        """
        if not (existing := self._read()):
            return self._create()
        if flock and self._is_of_this_machine(existing[0]):
            # A live process would still have the lock.
            self._write()
            return True
        if not self._is_silent(*existing):
            return False
        self._write()
        time.sleep(SETTLING_SECONDS)
        return self.is_ours()

    def is_free(self, *, flock: bool) -> bool:
        """Whether no live process seems to have the lease; only reads. Args: flock: whether the lock is known to be free."""
        if not (existing := self._read()):
            return True
        holder, beat = existing
        if flock and self._is_of_this_machine(holder):
            return True
        now = time.time()
        # On a full disk, which is about to be cleaned, the file system's clock can't be read.
        with suppress(OSError):
            now = self._now()
        return now - beat > DEAD_SECONDS

    def holder(self) -> Holder | None:
        return existing[0] if (existing := self._read()) else None

    def is_ours(self) -> bool:
        return self.holder() == self.this_process

    def check(self) -> None:
        """Raise SnaketuneError if the lease is lost; called before anything is written that another process might write."""
        # A file that can't be read now doesn't mean a lost lease; the following write will fail if there is a problem.
        with suppress(OSError):
            if not self.is_ours():
                raise SnaketuneError(self._lost())

    def beat(self, on_lost: Callable[[str], None] = end_process) -> None:
        """Send heartbeats from now on, in a thread. Args: on_lost: called with the message when the lease is lost."""

        def send() -> None:
            while not self._ended.wait(SECONDS_BETWEEN_BEATS):
                # The file server may be away or the disk full: the next heartbeat may succeed.
                with suppress(OSError):
                    if self.is_ours():
                        os.utime(self.path)
                    elif not self._ended.is_set():
                        on_lost(self._lost())
                        return

        threading.Thread(target=send, daemon=True, name=self.path.name).start()

    def give_back(self) -> None:
        """Release the lease; that of another process stays."""
        self._ended.set()
        with suppress(OSError):
            if self.is_ours():
                self.path.unlink()

    def _lost(self) -> str:
        if not self.path.exists():
            missing = self.path if self.path.parent.is_dir() else self.path.parent
            return (
                f"{missing} no longer exists: it or a folder above it was renamed, moved or removed while this process worked "
                "there, so this process writes nothing more. Move it back, unless it was removed, and run again; work "
                "resumes from the last checkpoint"
            )
        return (
            f"{self.path.parent} was taken over by {self.holder() or 'another process'} (this process sent no heartbeat for "
            f"{DEAD_SECONDS:.0f} s), so this process writes nothing more. The other one resumes from the last checkpoint"
        )

    def _is_of_this_machine(self, holder: Holder | None) -> bool:
        if holder and holder.boot:
            return holder.boot == self.this_process.boot
        return holder is not None and holder.host == self.this_process.host

    def _is_silent(self, holder: Holder | None, beat: float) -> bool:
        """Whether there was no heartbeat for so long that the holder counts as dead."""
        if (holder, beat) != self._seen:
            self._seen, self._since = (holder, beat), time.monotonic()
        return self._now() - beat > DEAD_SECONDS and time.monotonic() - self._since >= WATCHED_SECONDS

    def _now(self) -> float:
        try:
            with self._partial.open("w") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            self._partial.unlink(missing_ok=True)

    def _read(self) -> tuple[Holder | None, float] | None:
        """The holder (None if the file names none) and the last heartbeat; None if there is no lease."""
        try:
            # Opened first, since NFS may show old attributes of a file that isn't open.
            with self.path.open(encoding="utf-8") as file:
                beat, text = os.fstat(file.fileno()).st_mtime, file.read()
        except FileNotFoundError:
            return None
        try:
            return Holder(**json.loads(text)), beat
        except (ValueError, TypeError):
            return None, beat

    def _create(self) -> bool:
        """Create the file; False if another process does so first. Until it has content, it counts as a live process's."""
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _write(self) -> None:
        self._partial.write_text(self._content(), encoding="utf-8")
        self._partial.replace(self.path)

    def _content(self) -> str:
        return json.dumps(asdict(self.this_process)) + "\n"
