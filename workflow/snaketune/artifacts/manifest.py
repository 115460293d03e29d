"""Artifacts and their `manifest.json`: what one holds, was made from and lost on the way; its files, digests checked.

Deterministic: the same work gives the same bytes, whoever did it and when. What differs from run to run (time, host,
throughput) is in `run.json`, on which nothing depends.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_file, digest_json
from snaketune.errors import SnaketuneError

# Where a manifest has its own digest.
SEAL = "manifest_digest"
# What a reader goes by besides the payload itself.
FORMAT_KEYS = ("kind", "format_version", "row_length", "pad_id", "padding_id", "beneath_dtype")


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, two spaces, written beside and renamed, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(
        json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """With a digest of all that it says, so that a damaged one is known for what it is."""
    said = {key: value for key, value in manifest.items() if key != SEAL}
    # As it will be read: keys that are numbers here are texts there.
    write_json(path, said | {SEAL: digest_json(json.loads(json.dumps(said)))})


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
    """A finished result on disk."""

    manifest_path: Path
    manifest: dict[str, Any]
    folder: Path

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
        found = digest_file(path)
        if found != entry["digest"]:
            raise SnaketuneError(
                f"{path} is damaged: its digest is {found}, the manifest says {entry['digest']}; {self._heal()}"
            )
        return path

    def files(self, prefix: str = "") -> list[Path]:
        """All payload files whose name starts with `prefix`, verified, in order of name."""
        return [self.file(name) for name in sorted(self.manifest["payload"]) if name.startswith(prefix)]

    def _heal(self) -> str:
        return f"rebuild it with: {rebuild_command(self.manifest_path)}"


def rebuild_command(manifest: Path) -> str:
    """What makes an artifact again, with the config that this run was given."""
    config = os.environ.get("SNAKETUNE_CONFIG", "")
    return f"snakemake{config and f' --configfile {config}'} --forcerun {manifest}"


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
    if is_damaged(manifest):
        raise SnaketuneError(f"{manifest_path} is damaged: it isn't as it was written; remove it and run again")
    return Artifact(manifest_path, manifest, manifest_path.parent / payload)


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
