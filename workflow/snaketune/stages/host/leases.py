"""Leases: a file that names the process which works in a folder; it is touched every few seconds, for other hosts to see.

    <lock>.lease    {"host", "process", "began", "boot", "processes", "token"}; its time of modification is the last heartbeat

`flock` is tried first (locks.py): it is immediate, and the kernel releases it. But on some file systems it works within one
host only, and some have none. So a process that has the lock also takes a lease, and waits for those of other hosts; without
flock, the lease is the only lock. Times are compared among files of one folder, so all are by the file system's clock, and the
hosts' clocks may be wrong. Whether a process of this machine exists, and started when its lease says, is looked up in the
kernel.

A thread sends the heartbeats, so code that holds the GIL for longer than DEAD_SECONDS looks dead. If another host waits for the
folder, it takes it over, and the work since the last checkpoint is lost, but nothing is written twice.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from snaketune.errors import SnaketuneError

SECONDS_BETWEEN_BEATS = 5.0
# NFS clients may show a file as it was up to 60 s ago (acregmax); a lease older than this has missed six more heartbeats.
DEAD_SECONDS = 90.0
# After an outage of the file server all leases look dead, so a lease is watched for two heartbeats before it is taken over.
WATCHED_SECONDS = 2 * SECONDS_BETWEEN_BEATS
# A process that takes over a dead lease waits this long for others that do so too; the last one to write has it.
SETTLING_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        began: start time of the process by the kernel's count, since its number may be reused.
        boot: id of the machine's boot; empty if unknown.
        processes: the PID namespace of the process's number.
        token: unique id of this lease.
    """

    host: str
    process: int
    began: str
    boot: str
    processes: str
    token: str

    @classmethod
    def here(cls) -> "Holder":
        """Return this process as a holder, with a new token."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            began=_start_time(os.getpid()),
            boot=_boot(),
            processes=_namespace(),
            token=uuid.uuid4().hex,
        )

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it runs under the same kernel; another machine may have the same name."""
        return self.boot == _boot() if self.boot else self.host == socket.gethostname()

    @property
    def is_known(self) -> bool:
        """Whether this process can look it up in the kernel."""
        return self.is_on_this_machine and self.processes == _namespace()

    @property
    def is_dead(self) -> bool:
        """Whether it is known to have ended."""
        if not self.is_known:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return _start_time(self.process) != self.began

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Lease:
    """One lock's lease file, as one process sees it."""

    def __init__(self, lock: Path):
        self.path = lock.with_name(f"{lock.name}.lease")
        self.own = Holder.here()
        self._ended = threading.Event()
        # The last heartbeat seen of another holder, and since when it is unchanged.
        self._seen: tuple[str, float] = ("", 0.0)
        self._since = 0.0

    def take(self, *, flock: bool) -> bool:
        """Take the lease unless a live process has it.

        Args:
            flock: whether this process holds the lock that the lease belongs to, so no other process on this machine does.
        """
        existing = self._read()
        if existing is None:
            return self._create()
        holder, beat = existing
        if flock and holder and holder.is_on_this_machine:
            # A live process would still have the lock.
            self._write(self.path)
            return True
        if not (holder.is_dead if holder and holder.is_known else self._silent(holder, beat)):
            return False
        self._write(self.path)
        time.sleep(SETTLING_SECONDS)
        return self.is_ours()

    def is_free(self) -> bool:
        """Whether no live process seems to have the lease. Only reads; creates nothing for a lease that doesn't exist."""
        existing = self._read()
        if existing is None:
            return True
        holder, beat = existing
        if holder and holder.is_known:
            return holder.is_dead
        try:
            now = self._now()
        except OSError:
            # The disk is full, and about to be cleaned.
            now = time.time()
        return now - beat > DEAD_SECONDS

    def holder(self) -> Holder | None:
        """Return the holder that the file names."""
        return existing[0] if (existing := self._read()) else None

    def is_ours(self) -> bool:
        """Whether the file still names this process."""
        return (holder := self.holder()) is not None and holder.token == self.own.token

    def check(self) -> None:
        """Raise SnaketuneError if the lease is lost; called before anything is written that another process might write."""
        # A file that can't be read now doesn't mean a lost lease; the following write will fail if there is a problem.
        with contextlib.suppress(OSError):
            if not self.is_ours():
                raise SnaketuneError(self.lost())

    def lost(self) -> str:
        """Return the error message for a lost lease."""
        return (
            f"{self.path.parent} was taken over by {self.holder() or 'another process'} (this process sent no heartbeat for "
            f"{DEAD_SECONDS:.0f} s), so this process writes nothing more. The other one resumes from the last checkpoint"
        )

    def beat(self, on_lost: Callable[[str], None] | None = None) -> None:
        """Send heartbeats from now on, in a thread.

        Args:
            on_lost: called with the message when the lease is lost; by default it ends this process.
        """
        threading.Thread(target=self._beat, args=(on_lost or _end,), daemon=True, name=f"{self.path.name}").start()

    def give_back(self) -> None:
        """Release the lease; that of another process stays."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if self.is_ours():
                self.path.unlink()

    def _beat(self, on_lost: Callable[[str], None]) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_BEATS):
            try:
                if self.is_ours():
                    os.utime(self.path)
                elif not self._ended.is_set():
                    on_lost(self.lost())
                    return
            except OSError:
                # The file server is away or the disk is full: the next heartbeat may succeed.
                continue

    def _silent(self, holder: Holder | None, beat: float) -> bool:
        """Whether there was no heartbeat for so long that the holder counts as dead."""
        state = (holder.token if holder else "", beat)
        if state != self._seen:
            self._seen, self._since = state, time.monotonic()
        return self._now() - beat > DEAD_SECONDS and time.monotonic() - self._since >= WATCHED_SECONDS

    def _now(self) -> float:
        """Return the time by the file system's clock."""
        probe = self.path.with_name(f".{self.path.name}.asked-{self.own.token}")
        try:
            with probe.open("w") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _read(self) -> tuple[Holder | None, float] | None:
        """Return the holder (None if the file names none) and the last heartbeat; None if there is no lease."""
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
        """Create the file with its content if it doesn't exist."""
        partial = self.path.with_name(f".{self.path.name}.asked-{self.own.token}")
        self._write(partial)
        try:
            os.link(partial, self.path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here. A process that dies between the two steps leaves an empty file, which counts as dead in time.
            try:
                self.path.open("x").close()
            except FileExistsError:
                return False
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)
        return True

    def _write(self, path: Path) -> None:
        partial = path.with_name(f".{self.path.name}.{self.own.token}")
        partial.write_text(json.dumps(asdict(self.own)) + "\n", encoding="utf-8")
        partial.replace(path)


def _end(message: str) -> None:
    """End this process at once, since its further writes would mix with another process's files."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _start_time(process: int) -> str:
    try:
        # The name of the program may contain blanks and brackets.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
