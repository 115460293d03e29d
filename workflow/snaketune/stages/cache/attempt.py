"""What an attempt to build a result goes by, checked again where its inputs and its code have really been read.

A fingerprint is computed first, and files are read, modules imported and threads started after it, some of them in another
process. `state/attempt.json` takes along what that process has to compare with.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.code_digest import import_checked

FILE = "attempt.json"
# Size, times of the last change of content and of the entry, inode; of a file that is gone, nothing.
Stamp = tuple[int, ...]
# What a later attempt goes on with: checkpoints of a training, shards and log-probabilities already written.
UNFINISHED_WORK = ("checkpoints/checkpoint-*/complete", "shards/*", "chunks/*")


def stamps_of(paths: Iterable[Path]) -> dict[str, Stamp]:
    """What changes of a file whenever its content does, also where it is replaced by an older one."""
    found = {}
    for path in paths:
        try:
            about = path.stat()
            found[str(path)] = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
        except OSError:
            found[str(path)] = ()
    return found


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a stage.

    Attributes:
        code: digest of the stage's code that the fingerprint holds.
        stamps: of the files from outside, taken before the fingerprint was computed.
        digests: of the same files, as the fingerprint holds them.
        versions: of the libraries that the work was begun with.
        threads: that torch sums with; None where a stage doesn't compute with torch.
    """

    stage: str
    code: str
    stamps: dict[str, Stamp]
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    threads: int | None = None

    def check_files(self) -> None:
        """Raise SnaketuneError if a file isn't any more what it was before its digest was computed."""
        if changed := [path for path, stamp in self.stamps.items() if self._changed(path, tuple(stamp))]:
            raise SnaketuneError(f"{', '.join(changed)} changed while the {self.stage} stage read it; run again")

    def _changed(self, path: str, before: Stamp) -> bool:
        now = stamps_of([Path(path)])[path]
        if now == before:
            return False
        # A hard link or other rights change the entry's time (the third) alone; so does an edit that sets its times back.
        entry_alone = before and now and before[:2] + before[3:] == now[:2] + now[3:]
        return not entry_alone or digest_file(Path(path)) != self.digests.get(path)

    def import_code(self, module: str) -> None:
        """Import all that shapes the stage's result; SnaketuneError if that isn't the code of the fingerprint."""
        import_checked(module, self.code, self.stage)

    def save(self, state: Path) -> None:
        """For `read`."""
        write_json(state / FILE, vars(self))


def read_attempt(state: Path) -> Attempt | None:
    """The attempt that works with this state folder; None where somebody started a process by hand."""
    try:
        return Attempt(**json.loads((state / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def check_files(state: Path) -> None:
    """Called where the files have been read, and before anything that comes of them is kept."""
    if attempt := read_attempt(state):
        attempt.check_files()


def resumed_from_versions(state: Path, versions: dict[str, str | None]) -> dict[str, str | None]:
    """The libraries that half-done work was begun with in another version than that of `versions`, and in which."""
    before = read_attempt(state)
    if before is None or not any(found for pattern in UNFINISHED_WORK for found in state.glob(pattern)):
        return {}
    older = {name: then for name, then in before.versions.items() if name in versions and then != versions[name]}
    if older:
        told = ", ".join(f"{name} {then}, now {versions[name]}" for name, then in older.items())
        print(f"going on with what was begun with other versions: {told}", flush=True)
    return older


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(state: Path) -> int:
    """How many threads to compute with: as many as the first attempt, for float32 sums depend on it; else as many as given."""
    before = read_attempt(state)
    given = int(os.environ.get("OMP_NUM_THREADS") or cores())
    if before is None or before.threads is None:
        return given
    if before.threads != given:
        print(f"computing with {before.threads} threads, as when this began, and not with {given}", flush=True)
    return before.threads


@contextmanager
def use_threads(threads: int | None) -> Iterator[None]:
    """Let torch, here or in a process started from here, begin with this number of threads."""
    before = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if threads is not None:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
