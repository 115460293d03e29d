"""Work folders: where stages work, and where finished results are cached until they are published, for the first time or again.

Snakemake deletes a rule's declared outputs before every attempt, so stages don't work there. A retry finds its own unfinished
work by its fingerprint; so does a config that was put back to an earlier state.

    results/.work/<stage>/<fingerprint>/
        lock, lock.lease     held while a process works here (host/locks.py)
        state/               survives a killed attempt (checkpoints; attempt.json: what the attempt uses)
        payload.partial/     the payload while it is written
        payload/             complete, once manifest.json exists
        manifest.json
        run.json
        unpublished          exists while the result may not have been published yet
        log                  of the attempt that finished
"""

import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, note_published, read_artifact, read_json, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.files import set_modes, sync_folder, write_json
from snaketune.stages.cache.payload_files import place, restore
from snaketune.stages.host.locks import Lease

WORK_ROOT = Path("results/.work")
# By output folder, the fingerprint of the result that is to be published there.
CLAIMS = ".claims"
# In a state.
CHECKPOINTS = "checkpoints/checkpoint-*/complete"


def _path(name: str) -> Any:
    return property(lambda work: work.folder / name)  # pyrefly: ignore[implicit-any-lambda]


@dataclass(frozen=True)
class WorkFolder:
    """The work folder of one fingerprint. The stage fills `payload`; `state` survives a killed attempt.

    Attributes:
        lease: of the process that works here; None if a stage's function is called directly.
    """

    folder: Path
    lease: Lease | None = None

    payload = _path("payload.partial")
    finished = _path("payload")
    state = _path("state")
    manifest = _path("manifest.json")
    run = _path("run.json")
    unpublished = _path("unpublished")
    log = _path("log")

    @property
    def root(self) -> Path:
        """The folder of all work folders: `results/.work`."""
        return self.folder.parent.parent

    def check_held(self) -> None:
        """Raise SnaketuneError if another process has taken the folder over; called before anything shared is written."""
        if self.lease:
            self.lease.check()

    def result(self) -> Artifact | None:
        """The finished result, verified, or None.

        Damaged files are replaced by intact copies of other results. Without one, the result is removed, and made again.
        """
        if not self.manifest.is_file():
            return None
        set_modes(self.finished)
        try:
            artifact = read_artifact(self.manifest, "payload")
            for name in _files(artifact):
                self._verify(artifact, name)
        except SnaketuneError as error:
            print(f"the cached result is damaged and is made again: {_problem(error)}", flush=True)
            self.manifest.unlink()
            return None
        return artifact

    def _verify(self, artifact: Artifact, name: str) -> None:
        """Restore a file if it is missing or damaged; SnaketuneError if there is no intact copy, OSError if it can't be read or
        written."""
        try:
            artifact.file(name)
        except SnaketuneError as error:
            path, entry = artifact.folder / name, (artifact.manifest["payload"] | artifact.manifest["records"])[name]
            # Nothing is written through a link.
            is_inside = path.parent.resolve() == (self.folder.resolve() / "payload" / name).parent
            if not is_inside or not (intact := restore(path, entry, self.root.parent)):
                if path.is_file() and not os.access(path, os.R_OK):
                    # Of another user: not damaged.
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from None
                raise
            print(f"{_problem(error)}; it is restored from {intact}", flush=True)

    def keep_log(self, log: Path, started: float) -> None:
        """Copy the log that a job's rule writes, unless it is older than the attempt, as when a job runs without its rule."""
        if log.is_file() and log.stat().st_mtime >= started:
            shutil.copyfile(log, self.log)

    def made_at(self) -> str:
        return read_json(self.run, {}).get("started", "earlier")

    def start(self) -> None:
        """Create an empty `payload`; the state of an earlier attempt is retained."""
        for leftover in (self.payload, self.finished):
            remove(leftover)
        if self.state.is_symlink():
            remove(self.state)
        self.payload.mkdir(parents=True)
        self.state.mkdir(exist_ok=True)

    def discard(self) -> None:
        """Remove unfinished work, so that no later attempt resumes it."""
        for unfinished in (self.payload, self.state):
            remove(unfinished)

    def resume_from(self, finished: Iterable["WorkFolder"]) -> None:
        """Take over the state of the first of these finished works that kept it, unless there is a checkpoint here."""
        if any(self.state.glob(CHECKPOINTS)):
            return
        for other in finished:
            if other.manifest.is_file() and any(other.state.glob(CHECKPOINTS)):
                shutil.copytree(other.state, self.state, copy_function=_link_tensors, dirs_exist_ok=True)
                return

    def finish(self, manifest: dict[str, Any], run: dict[str, Any], keep_state: bool = False) -> None:
        """Rename the written payload to its final name, write the manifest last, and then remove the state, unless another
        job resumes from it."""
        set_modes(self.payload)
        sync_folder(self.payload)
        self.check_held()
        self.unpublished.touch()
        self.payload.rename(self.finished)
        write_json(self.run, run)
        write_manifest(self.manifest, manifest)
        if not keep_state:
            shutil.rmtree(self.state, ignore_errors=True)


def _link_tensors(source: str, target: str) -> None:
    """Copy a file, or link it if it holds tensors, which are never written in place."""
    Path(target).unlink(missing_ok=True)
    if source.endswith(".safetensors"):
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


def _files(artifact: Artifact) -> list[str]:
    return sorted((*artifact.manifest["payload"], *artifact.manifest["records"]))


def _problem(error: SnaketuneError) -> str:
    """An error without the advice that follows it."""
    return str(error).split(";")[0]


def remove(path: Path) -> None:
    """Remove a folder with its content; of a link only the link, since its target belongs to someone else."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


class Claim:
    """The claim of an output folder: only the attempt that started last publishes there.

    An attempt for an older config may have outlived its Snakemake process, and would overwrite the newer result, or half of it.
    """

    def __init__(self, out: Path, fingerprint: str, root: Path = WORK_ROOT):
        # Relative, since other hosts may mount the results at another path.
        name = hashlib.sha256(os.fsencode(os.path.relpath(out, root.parent))).hexdigest()[:16]
        self.out, self.fingerprint, self.file = out, fingerprint, root / CLAIMS / f"{name}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may claim it at the same time.
        draft = self.file.with_name(f"{name}.{socket.gethostname()}.{os.getpid()}")
        write_json(draft, fingerprint)
        draft.replace(self.file)

    def check(self) -> None:
        """Raise SnaketuneError if a process that started later makes another result for this folder."""
        # Without its file, as after a clean-up, the claim holds.
        last = read_json(self.file, self.fingerprint)
        if last != self.fingerprint:
            raise SnaketuneError(
                f"{self.out}: a job that started later makes another result for it ({last}); this one ({self.fingerprint}) "
                "stays in its work folder and isn't published. Run again when the other job has ended"
            )


def publish(artifact: Artifact, work: WorkFolder, claim: Claim, payload: str, requested: dict[str, Any]) -> None:
    """Publish a finished result in the folder that is claimed: payload, then the manifest.

    Args:
        work: the folder that holds it.
        requested: entries of the manifest that describe the job it is published for.
    """
    out, names = claim.out, _files(artifact)
    claim.check()
    # From here on, if the disk is full for long, the result may exist in the work folder only.
    work.unpublished.touch()
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    partial = out / f".{payload}.partial"
    for leftover in (partial, out / payload):
        remove(leftover)
    partial.mkdir()
    for name in names:
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        place(artifact.folder / name, target)
    partial.rename(out / payload)
    note_published(out, out / payload, names)
    if work.run.is_file():
        (out / "run.json").unlink(missing_ok=True)
        shutil.copyfile(work.run, out / "run.json")
    claim.check()
    write_manifest(out / "manifest.json", artifact.manifest | requested)
    work.unpublished.unlink(missing_ok=True)


def published_results(results: Path) -> Iterator[Artifact]:
    """Yield each published result, without its payload; SnaketuneError if its manifest is damaged.

    Hidden folders are skipped: they hold work, and a job file may be named `manifest`.
    """
    for path in sorted(results.rglob("manifest.json")):
        if not path.relative_to(results).parts[0].startswith("."):
            yield read_artifact(path, "")
