"""Work folders, what is in one: where stages work, and where a finished result waits to be published, now or again.

    results/.work/<stage>/<fingerprint>/
        lock, lock.lease     held while somebody works here (locks.py, leases.py)
        state/               what survives a killed attempt (checkpoints; attempt.json, what it goes by)
        payload.partial/     what is being written
        payload/             complete, once manifest.json exists
        manifest.json
        run.json
        unpublished          while the result is here alone, or may be

Snakemake deletes a rule's declared outputs before every attempt, so nothing is worked on there. A retry finds its own
half-done work by its fingerprint; so does a config that was put back to what it was yesterday.
"""

import hashlib
import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import (
    Artifact,
    note_published,
    read_artifact,
    sync_names,
    write_json,
    write_manifest,
)
from snaketune.errors import SnaketuneError
from snaketune.stages.host.leases import Lease

WORK_ROOT = Path("results/.work")
UNPUBLISHED = "unpublished"
# By place, the fingerprint of what is to be published there.
CLAIMS = ".claims"


def published_manifests(results: Path) -> list[Path]:
    """Of all published results; hidden folders hold none, but work, and the file of a job that may be called `manifest`."""
    found = sorted(results.rglob("manifest.json"))
    return [path for path in found if not path.relative_to(results).parts[0].startswith(".")]


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

    @property
    def unpublished(self) -> Path:
        return self.folder / UNPUBLISHED

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

    def made_at(self) -> str:
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
        self.unpublished.touch()
        self.payload.rename(self.finished)
        write_json(self.run, run)
        write_manifest(self.manifest, manifest)
        shutil.rmtree(self.state, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring all files below `folder` to the disk, so that what is said of them after a power cut is true."""
    for path in (folder, *folder.rglob("*")):
        if path.is_file():
            sync(path)
        elif path.is_dir():
            sync_names(path)


def sync(path: Path) -> None:
    """Bring a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a folder with all that is in it; of a link the link alone, for what it leads to isn't ours."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


class Claim:
    """Who publishes at a place: the attempt that began last. One of an older config may have outlived its driver, and would
    put its own result over the newer one, or half of it."""

    def __init__(self, out: Path, fingerprint: str, root: Path = WORK_ROOT):
        # Other hosts may see the results in another place.
        name = hashlib.sha256(os.fsencode(os.path.relpath(out, root.parent))).hexdigest()[:16]
        self.out, self.fingerprint, self.file = out, fingerprint, root / CLAIMS / f"{name}.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Several may claim it at once.
        own = self.file.with_name(f"{name}.{socket.gethostname()}.{os.getpid()}")
        write_json(own, fingerprint)
        own.replace(self.file)

    def check(self) -> None:
        """Raise SnaketuneError if somebody who began later makes another result for this place."""
        try:
            last = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Somebody tidied up.
            return
        if last != self.fingerprint:
            raise SnaketuneError(
                f"{self.out}: a job that began later makes another result for it ({last}); this one ({self.fingerprint}) is "
                "kept where it was made, and isn't published. Run again when the other one is done"
            )


def publish(artifact: Artifact, work: WorkFolder, claim: Claim, payload: str, requested: dict[str, Any]) -> None:
    """Make a finished result appear where it is claimed: payload by hard link (copy where there are none), manifest last.

    Args:
        work: that it is in.
        requested: entries of its manifest as the job has them that it is published for.
    Raises:
        SnaketuneError: somebody else's result belongs there by now.
    """
    out, run = claim.out, work.run
    claim.check()
    # From here on, and where a disk is full for long, it may be here alone.
    work.unpublished.touch()
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
    claim.check()
    write_manifest(out / "manifest.json", artifact.manifest | requested)
    work.unpublished.unlink(missing_ok=True)
