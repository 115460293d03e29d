"""One attempt to build a result: its job, inputs, code, versions and threads, and the time of all attempts.

`state/attempt.json` holds what processes compare with that read the job, files and modules, or start threads, after the
fingerprint was computed; `state/attempts.json` the seconds of each attempt, also of killed ones, updated every SECONDS_BETWEEN.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from snaketune.artifacts.manifest import read_json
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, write_json
from snaketune.locations import File, facts_of
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.threads import available_threads

if TYPE_CHECKING:
    from snaketune.stages.loaded_job import LoadedJob

FILE, TIMES = "attempt.json", "attempts.json"
SECONDS_BETWEEN = 10.0
# Size, times of the last change of content and of inode (in ns), and inode number; empty for a file that doesn't exist.
Stamp = tuple[int, ...]
# Unfinished work that a later attempt resumes: checkpoints of a training, shards already written.
UNFINISHED_WORK = ("checkpoints/checkpoint-*/complete", "shards/*")


def stamps_of(paths: Iterable[File]) -> dict[str, Stamp]:
    """The stamps of local files; remote ones have an identity."""
    return {str(path): stamp_of(path) for path in paths if isinstance(path, Path)}


def stamp_of(path: Path) -> Stamp:
    """Values that differ whenever a file's content has changed, also if it was replaced by an older file."""
    try:
        about = path.stat()
    except OSError:
        return ()
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to build the result of a stage.

    Attributes:
        code: digest of the stage's code that is in the fingerprint.
        job: digest of the job.
        inputs: digests of artifacts and files by role, as in the fingerprint.
        stamps: of the local external files, taken before the fingerprint was computed.
        digests: of all external files, as in the fingerprint.
        versions: of the libraries that the first attempt used.
        threads: the number of threads that torch sums with; None if the stage doesn't compute with torch.
    """

    stage: str
    code: str
    stamps: dict[str, Stamp]
    job: str = ""
    inputs: dict[str, list[str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    threads: int | None = None

    def check_job(self, job: "LoadedJob") -> None:
        """Raise SnaketuneError if a job that was read again, or a result that it reads, is another one now."""
        if job.digest != self.job:
            raise SnaketuneError(f"{job.path}, or what its race decided, changed since this job began; run again")
        for role, artifacts in job.artifacts.items():
            for artifact, counted in zip(artifacts, self.inputs[role], strict=True):
                if artifact.counted != counted:
                    raise SnaketuneError(f"{artifact.manifest_path} changed since this job began; run again")

    def check_files(self) -> None:
        """Raise SnaketuneError if a file has changed since before its digest was computed."""
        changed = [path for path, stamp in self.stamps.items() if self._has_changed(path, tuple(stamp))]
        remote = facts_of(self.digests, fresh=True)
        if changed := changed + [url for url, facts in remote.items() if facts.identity != self.digests[url]]:
            raise SnaketuneError(f"{', '.join(changed)} changed while the {self.stage} stage read it; run again")

    def _has_changed(self, path: str, before: Stamp) -> bool:
        now = stamp_of(Path(path))
        if now == before:
            return False
        # A new hard link or new permissions change the inode's time (the third entry) alone; so does an edit that resets times.
        only_inode_time = before and now and before[:2] + before[3:] == now[:2] + now[3:]
        return not only_inode_time or self.digests.get(path) != digest_file(Path(path))

    def save(self, state: Path) -> None:
        write_json(state / FILE, vars(self))


def read_attempt(state: Path) -> Attempt | None:
    """Read the attempt of a state folder; None if there is none, as for a process that was started from the command line.
    SnaketuneError if it is damaged."""
    try:
        return TypeAdapter(Attempt).validate_json((state / FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise SnaketuneError(f"{state / FILE} is damaged ({problem}); remove {state}, and run again") from None


def check_files(state: Path) -> None:
    """Check the files of a state folder's attempt; called after they were read and before anything made from them is stored."""
    if attempt := read_attempt(state):
        attempt.check_files()


def resumed_from_versions(state: Path, versions: dict[str, str]) -> dict[str, str]:
    """The libraries that unfinished work was started with in another version than `versions` has, with that version."""
    previous = read_attempt(state)
    if previous is None or not any(path for pattern in UNFINISHED_WORK for path in state.glob(pattern)):
        return {}
    older = {name: then for name, then in previous.versions.items() if name in versions and then != versions[name]}
    if older:
        changes = ", ".join(f"{name} {then}, now {versions[name]}" for name, then in older.items())
        print(f"resuming work that was started with other versions: {changes}", flush=True)
    return older


def thread_count(state: Path) -> int:
    """The number of threads: that of the first attempt, since float32 sums depend on it; otherwise all available."""
    previous = read_attempt(state)
    available = available_threads()
    threads = available if previous is None or previous.threads is None else previous.threads
    if threads != available:
        print(f"computing with {threads} threads, as the first attempt did, and not with {available}", flush=True)
    return threads


@contextmanager
def timed(work: WorkFolder) -> Iterator[Callable[[], list[float]]]:
    """Measure an attempt while it runs. Yields a function that returns the seconds of each attempt, this one's until now."""
    earlier, started, ended = read_json(work.state / TIMES, []), monotonic(), threading.Event()

    def elapsed() -> list[float]:
        return [*earlier, round(monotonic() - started, 3)]

    def write() -> None:
        # Nothing is written to a folder that was discarded or taken over, and no error here ends a training.
        with suppress(SnaketuneError, OSError):
            work.check_held()
            write_json(work.state / TIMES, elapsed())

    def update() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            write()

    thread = threading.Thread(target=update, name="attempts", daemon=True)
    thread.start()
    try:
        yield elapsed
    finally:
        ended.set()
        thread.join()
        write()
