"""Artifacts and their `manifest.json`: what one holds, was made from and lost on the way; its files, digests checked.

Deterministic: the same work gives the same bytes, whoever did it and when. What differs from run to run (time, host,
throughput) is in `run.json`, on which nothing depends.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_file, digest_json
from snaketune.errors import SnaketuneError

# Beside the manifest: size, time and inode of each file as it was published.
PUBLISHED = ".published.json"
# Where a manifest has its own digest.
SEAL = "manifest_digest"
# Names that older code wrote, and their names now. Read for one version.
FORMER_KEYS = {
    "beneath_dtype": "base_dtype",
    "begun_with": "resumed_from_versions",
    "begun_as": "resumed_from_numerics",
}
FORMER_INPUTS = {"beneath": "base_layers"}
FORMER_JOB_KEYS = {"asked_by": "config_key"}
# The entries that readers of the payload need besides the payload itself. Their order is part of every content digest.
FORMAT_KEYS = ("kind", "format_version", "row_length", "pad_id", "padding_id", "base_dtype")


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, two spaces, written beside and renamed, so that no reader sees half of it, nor does a power cut leave half:
    what it speaks for may be all that is kept."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # Made here and now: through a link that somebody else put there, a file elsewhere would be written.
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Bring a folder's own entries to the disk: which names there are, and not what is in them."""
    entries = os.open(folder, os.O_RDONLY)
    # Some file systems of networks know no such thing.
    with suppress(OSError):
        os.fsync(entries)
    os.close(entries)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """With a digest of all that it says, so that a damaged one is known for what it is."""
    said = {key: value for key, value in manifest.items() if key != SEAL}
    # As it will be read: keys that are numbers here are texts there.
    write_json(path, said | {SEAL: digest_json(json.loads(json.dumps(said)))})


def with_current_keys(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with keys that older code wrote under the names that they have now."""
    manifest = _renamed(manifest, FORMER_KEYS)
    manifest["inputs"] = _renamed(manifest.get("inputs", {}), FORMER_INPUTS)
    if "jobs" in manifest.get("spec", {}):
        jobs = [_renamed(job, FORMER_JOB_KEYS) for job in manifest["spec"]["jobs"]]
        manifest["spec"] = manifest["spec"] | {"jobs": jobs}
    return manifest


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def is_damaged(manifest: dict[str, Any]) -> bool:
    """Whether a manifest isn't as it was written; one from before they had a digest can't tell."""
    return SEAL in manifest and manifest[SEAL] != digest_json(
        {key: value for key, value in manifest.items() if key != SEAL}
    )


def content_digest(manifest: dict[str, Any]) -> str:
    """Digest of what readers of the artifact can read.

    It covers the payload and the format, not the counts, records and inputs: two ways to the same rows are the same rows,
    and what comes after needn't run again.
    """
    payload = {name: entry["digest"] for name, entry in manifest["payload"].items()}
    return digest_json({"payload": payload, "format": [manifest.get(key) for key in FORMAT_KEYS]})


@dataclass(frozen=True)
class Artifact:
    """A finished result on disk.

    Attributes:
        trusted: whether files that are the ones which were published count as verified.
    """

    manifest_path: Path
    manifest: dict[str, Any]
    folder: Path
    trusted: bool = False

    @cached_property
    def content(self) -> str:
        return content_digest(self.manifest)

    def file(self, name: str) -> Path:
        """Path of a payload file whose digest has been verified.

        Raises:
            SnaketuneError: the file is missing or changed; the message says how to heal it.
        """
        entry = {**self.manifest["payload"], **self.manifest["records"]}.get(name)
        path = self.folder / name
        if entry is None:
            raise SnaketuneError(f"{self.manifest_path} lists no file {name!r}")
        if not path.is_file():
            raise SnaketuneError(f"{path} is missing; {self._heal()}")
        if self.trusted and self._published.get(name) == _stamp(path):
            return path
        found = digest_file(path)
        if found != entry["digest"]:
            raise SnaketuneError(
                f"{path} is damaged: its digest is {found}, the manifest says {entry['digest']}; {self._heal()}"
            )
        return path

    def for_part(self, part: int) -> "Artifact":
        """For the job that computes this one of many parts (from 1) and reads its share of each file: the first verifies all of
        them for the others, or else each would read all that there is."""
        return replace(self, trusted=part > 1)

    @cached_property
    def _published(self) -> dict[str, list[int]]:
        try:
            return json.loads((self.manifest_path.parent / PUBLISHED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def files(self, prefix: str = "") -> list[Path]:
        """All payload files whose name starts with `prefix`, verified, in order of name."""
        return [self.file(name) for name in sorted(self.manifest["payload"]) if name.startswith(prefix)]

    def _heal(self) -> str:
        return f"rebuild it with: {rebuild_command(self.manifest_path)}"


def rebuild_command(manifest: Path) -> str:
    """What makes an artifact again, with the config that this run was given."""
    config = os.environ.get("SNAKETUNE_CONFIG", "")
    return f"snakemake{config and f' --configfile {config}'} --forcerun {manifest}"


def note_published(folder: Path, payload: Path, names: Iterable[str]) -> None:
    """Note in a result's folder which files were published there, whose digests had just been verified."""
    write_json(folder / PUBLISHED, {name: _stamp(payload / name) for name in names})


def _stamp(path: Path) -> list[int]:
    """What changes of a file when its content does, and not when it gets another name."""
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, about.st_ino]


def read_artifact(manifest_path: Path, payload: str) -> Artifact:
    """The artifact of a manifest, its payload in the folder `payload` beside it; SnaketuneError if unreadable."""
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{manifest_path} can't be read as a manifest: {error}; remove it and run again") from None
    described = [manifest.get(part) for part in ("payload", "records")] if isinstance(manifest, dict) else [None]
    if not all(isinstance(part, dict) and all("digest" in entry for entry in part.values()) for part in described):
        raise SnaketuneError(
            f"{manifest_path} is no snaketune manifest: it doesn't describe its payload; remove it and run again"
        )
    if outside := [name for part in described for name in part if not _lies_within(name)]:
        raise SnaketuneError(
            f"{manifest_path} names the file {outside[0]!r}, which lies outside its payload; no stage writes that, so somebody "
            "else did: remove it and run again"
        )
    if is_damaged(manifest):
        raise SnaketuneError(f"{manifest_path} is damaged: it isn't as it was written; remove it and run again")
    return Artifact(manifest_path, with_current_keys(manifest), manifest_path.parent / payload)


def _lies_within(name: str) -> bool:
    """Whether a name in a payload stays in it: a manifest from elsewhere may say anything.

    >>> [_lies_within(name) for name in ("a.arrow", "adapter/b..json", "../a", "a/../../b", "/etc/passwd", "", "a//b")]
    [True, True, False, False, False, False, False]
    """
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Digest, bytes and (for tables) rows of every file below `folder`, by relative name."""
    from snaketune.tables import count_rows

    described = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        entry: dict[str, Any] = {"digest": digest_file(path), "bytes": path.stat().st_size}
        if path.suffix == ".arrow":
            entry["rows"] = count_rows(path)
        described[path.relative_to(folder).as_posix()] = entry
    return described
