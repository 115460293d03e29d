"""Work folders, what is in one: where stages work, and where a finished result waits to be published, now or again.

    results/.work/<stage>/<fingerprint>/
        lock, lock.lease     held while somebody works here (locks.py, leases.py)
        state/               what survives a killed attempt (checkpoints; attempt.json, what it goes by)
        payload.partial/     what is being written
        payload/             complete, once manifest.json exists
        manifest.json
        run.json

Snakemake deletes a rule's declared outputs before every attempt, so nothing is worked on there. A retry finds its own
half-done work by its fingerprint; so does a config that was put back to what it was yesterday.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, note_published, read_artifact, write_json, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.stages.leases import Lease

WORK_ROOT = Path("results/.work")


@dataclass(frozen=True)
class WorkFolder:
    """One fingerprint's folder. `payload` is what the stage fills; `state` outlives a killed attempt.

    Attributes:
        lease: of whoever works here; None where somebody calls a stage's function by hand.
    """

    folder: Path
    lease: Lease | None = None

    @property
    def root(self) -> Path:
        """Of all work folders: `results/.work`."""
        return self.folder.parent.parent

    @property
    def payload(self) -> Path:
        return self.folder / "payload.partial"

    @property
    def finished(self) -> Path:
        return self.folder / "payload"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def run(self) -> Path:
        return self.folder / "run.json"

    def check_held(self) -> None:
        """Before anything is written that another process might write; SnaketuneError if one has taken the folder over."""
        if self.lease:
            self.lease.check()

    def result(self) -> Artifact | None:
        """The complete, verified result, or None. A damaged one is removed, so that it is made again."""
        if not self.manifest.is_file():
            return None
        try:
            artifact = read_artifact(self.manifest, "payload")
            for name in (*artifact.manifest["payload"], *artifact.manifest["records"]):
                artifact.file(name)
        except SnaketuneError as error:
            print(f"the kept result is not intact and is made again: {str(error).split(';')[0]}", flush=True)
            self.manifest.unlink()
            return None
        return artifact

    def made(self) -> str:
        """When the result was made."""
        try:
            return json.loads(self.run.read_text(encoding="utf-8"))["started"]
        except (OSError, ValueError, LookupError, TypeError):
            return "earlier"

    def start(self) -> None:
        """An empty `payload`, beside whatever state an earlier attempt left."""
        for leftover in (self.payload, self.finished):
            remove(leftover)
        if self.state.is_symlink():
            remove(self.state)
        self.payload.mkdir(parents=True)
        self.state.mkdir(exist_ok=True)

    def discard(self) -> None:
        """Nothing of what was begun here is to be gone on with."""
        for begun in (self.payload, self.state):
            remove(begun)

    def finish(self, manifest: dict[str, Any], run: dict[str, Any]) -> None:
        """The payload is written: give it its final name, the manifest last; only then is the state not needed any more."""
        sync_folder(self.payload)
        self.check_held()
        self.payload.rename(self.finished)
        write_json(self.run, run)
        write_manifest(self.manifest, manifest)
        shutil.rmtree(self.state, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring all files below `folder` to the disk, so that what is said of them after a power cut is true."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def sync(path: Path) -> None:
    """Bring a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a folder with all that is in it; of a link the link alone, for what it leads to isn't ours."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def publish(artifact: Artifact, run: Path, out: Path, payload: str, asked: dict[str, Any]) -> None:
    """Make a finished result appear at `out`: payload by hard link (copy where there are none), manifest last.

    Args:
        asked: entries of its manifest as the job has them that it is published for.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    partial = out / f".{payload}.partial"
    for leftover in (partial, out / payload):
        remove(leftover)
    partial.mkdir()
    for name in sorted((*artifact.manifest["payload"], *artifact.manifest["records"])):
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(artifact.folder / name, target)
        except OSError:
            shutil.copyfile(artifact.folder / name, target)
    partial.rename(out / payload)
    note_published(out, out / payload, (*artifact.manifest["payload"], *artifact.manifest["records"]))
    if run.is_file():
        (out / "run.json").unlink(missing_ok=True)
        shutil.copyfile(run, out / "run.json")
    write_manifest(out / "manifest.json", artifact.manifest | asked)
