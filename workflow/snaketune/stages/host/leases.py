"""Leases: who works in a folder says so in a file there, and touches it every few seconds, so that other hosts see it live.

    <lock>.lease    {"host", "process", "began", "boot", "processes", "token"}; its time of modification is its last beat

`flock` is the first means (locks.py): at once, and freed by the kernel. But on some file systems it is known to its own host
alone, and some have none. Whoever has the lock makes a lease besides, and waits for those of other hosts; without flock, it is
all there is. Times are compared among files of one folder, so all are by the file system's clock, and hosts' clocks may be
wrong. Of this machine, the kernel tells: whether the process is there, and began when the lease says.

A thread beats, so code that keeps Python's lock for longer than DEAD_SECONDS looks dead: it then loses the folder to another
host, if one waits for it, and with it the work since its last checkpoint, but nothing is written twice.
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
# NFS clients may show a file as it was up to 60 s ago (acregmax); what looks older than this has missed six beats besides.
DEAD_SECONDS = 90.0
# A file server that was away lets all leases look dead: before one is taken, it is watched for two beats that may still come.
WATCHED_SECONDS = 2 * SECONDS_BETWEEN_BEATS
# How long who takes a dead lease waits for another one who does so at the same time; the last one to write has it.
SETTLING_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease.

    Attributes:
        began: when the process began, by the kernel's count; another process may get its number later.
        boot: of the machine's kernel since it was started; nothing where that can't be known.
        processes: the namespace that the process's number is of.
        token: of this one lease.
    """

    host: str
    process: int
    began: str
    boot: str
    processes: str
    token: str

    @classmethod
    def here(cls) -> "Holder":
        """This process, with a token of its own."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            began=_began(os.getpid()),
            boot=_boot(),
            processes=_namespace(),
            token=uuid.uuid4().hex,
        )

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the same kernel runs it; another machine may have the same name."""
        return self.boot == _boot() if self.boot else self.host == socket.gethostname()

    @property
    def is_known(self) -> bool:
        """Whether this process can ask the kernel for it."""
        return self.is_on_this_machine and self.processes == _namespace()

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be gone."""
        if not self.is_known:
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return _began(self.process) != self.began

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Lease:
    """One lock's lease file, as one process sees it."""

    def __init__(self, lock: Path):
        self.path = lock.with_name(f"{lock.name}.lease")
        self.own = Holder.here()
        self._ended = threading.Event()
        # What was seen of somebody else's last, and since when it looks so.
        self._seen: tuple[str, float] = ("", 0.0)
        self._since = 0.0

    def take(self, *, flock: bool) -> bool:
        """Take it if nobody lives who has it.

        Args:
            flock: whether this process has the lock that goes with it, so that nobody else on this machine does.
        """
        there = self._read()
        if there is None:
            return self._create()
        holder, beat = there
        if flock and holder and holder.is_on_this_machine:
            # It would have the lock if it lived.
            self._write(self.path)
            return True
        if not (holder.is_dead if holder and holder.is_known else self._silent(holder, beat)):
            return False
        self._write(self.path)
        time.sleep(SETTLING_SECONDS)
        return self.is_ours()

    def is_free(self) -> bool:
        """Whether nobody seems to live who has it; only looked at, and nothing is made for it where nobody has it."""
        there = self._read()
        if there is None:
            return True
        holder, beat = there
        if holder and holder.is_known:
            return holder.is_dead
        try:
            now = self._now()
        except OSError:
            # A full disk, which is to be cleaned.
            now = time.time()
        return now - beat > DEAD_SECONDS

    def holder(self) -> Holder | None:
        """Who has it, as far as the file says."""
        return there[0] if (there := self._read()) else None

    def is_ours(self) -> bool:
        """Whether the file still says so."""
        return (holder := self.holder()) is not None and holder.token == self.own.token

    def check(self) -> None:
        """Called before anything is written that somebody else might write; SnaketuneError if the lease is lost."""
        # What can't be read now isn't lost; the write to come will tell.
        with contextlib.suppress(OSError):
            if not self.is_ours():
                raise SnaketuneError(self.lost())

    def lost(self) -> str:
        """What to say then."""
        return (
            f"{self.path.parent} was taken over by {self.holder() or 'somebody'} (this process had given no sign of life for "
            f"{DEAD_SECONDS:.0f} s), so nothing more is written here. The other one goes on with the work; nothing is lost"
        )

    def beat(self, on_lost: Callable[[str], None] | None = None) -> None:
        """Show from now on, in a thread of its own, that this process lives.

        Args:
            ends: called with what to say when the lease is lost; by default it ends this process.
        """
        threading.Thread(target=self._beat, args=(on_lost or _end,), daemon=True, name=f"{self.path.name}").start()

    def give_back(self) -> None:
        """Nobody has it any more; somebody else's stays."""
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
                # A file server that is away, a full disk: the next beat may come through.
                continue

    def _silent(self, holder: Holder | None, beat: float) -> bool:
        """Whether nothing was heard for so long that its holder counts as dead."""
        look = (holder.token if holder else "", beat)
        if look != self._seen:
            self._seen, self._since = look, time.monotonic()
        return self._now() - beat > DEAD_SECONDS and time.monotonic() - self._since >= WATCHED_SECONDS

    def _now(self) -> float:
        """By the file system's clock."""
        asked = self.path.with_name(f".{self.path.name}.asked-{self.own.token}")
        try:
            with asked.open("w") as file:
                return os.fstat(file.fileno()).st_mtime
        finally:
            asked.unlink(missing_ok=True)

    def _read(self) -> tuple[Holder | None, float] | None:
        """Who has it (None where the file doesn't say) and its last beat; None where there is no lease."""
        try:
            # Opened, since what NFS tells of a file that isn't may be old.
            with self.path.open(encoding="utf-8") as file:
                beat, text = os.fstat(file.fileno()).st_mtime, file.read()
        except FileNotFoundError:
            return None
        try:
            return Holder(**json.loads(text)), beat
        except (ValueError, TypeError):
            return None, beat

    def _create(self) -> bool:
        """Make the file, with all that is in it, if there is none."""
        partial = self.path.with_name(f".{self.path.name}.asked-{self.own.token}")
        self._write(partial)
        try:
            os.link(partial, self.path)
        except FileExistsError:
            return False
        except OSError:
            # No hard links here. Whoever dies between the two leaves an empty file, which is dead in time.
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


def _end(told: str) -> None:
    """At once: what this process still writes would be among somebody else's files."""
    print(f"error: {told}", file=sys.stderr, flush=True)
    os._exit(1)


def _began(process: int) -> str:
    try:
        # The name of the program may hold blanks and brackets.
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
