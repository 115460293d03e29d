"""Artifacts and their `manifest.json`: spec, inputs, counts, and the digests of payload files, which are verified on reading.

The same work gives the same manifest, byte for byte; what differs from run to run is in `run.json`, on which nothing depends.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.plain_json import parse_json
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, write_json

# Beside the manifest: size, time and inode of each file when it was published.
PUBLISHED = ".published.json"
# The key of a manifest's own digest.
SEAL = "manifest_digest"
# The entries that readers of the payload need besides the payload itself: part of every content digest.
FORMAT_KEYS = ("kind", "format_version", "row_length", "order", "pad_id", "padding_id", "base_dtype")


@dataclass(frozen=True)
class Artifact:
    """A finished result on disk.

    Attributes:
        manifest: of an input of a stage, only what the stage's fingerprint counts (`as_input`).
        trusted: whether files that are unchanged since they were published count as verified.
        entries: what an input counts besides its content.
        whole: the manifest of an input with all entries.
    """

    manifest_path: Path
    manifest: dict[str, Any]
    folder: Path
    trusted: bool = False
    entries: tuple[str, ...] = ()
    whole: dict[str, Any] | None = None

    def as_input(self, entries: tuple[str, ...]) -> "Artifact":
        """The artifact as a stage reads it: its manifest has nothing that the stage's fingerprint doesn't count.

        Args:
            entries: names of manifest entries that the stage reads besides the content, such as `spec.kind`.
        """
        fixed: dict[str, Any] = {"payload": self.manifest["payload"], "records": {}}
        manifest = fixed | counted_entries(self.manifest, entries)
        return replace(self, manifest=manifest, entries=entries, whole=self.provenance)

    @property
    def provenance(self) -> dict[str, Any]:
        """The manifest with all entries: for messages, and for checks that refuse an input. No result may depend on it."""
        return self.manifest if self.whole is None else self.whole

    @cached_property
    def content(self) -> str:
        return content_digest(self.manifest)

    @cached_property
    def counted(self) -> str:
        """The digest of all that the stage that it is an input of reads."""
        return content_digest(self.manifest, self.entries)

    def file(self, name: str) -> Path:
        """The path of a payload file; SnaketuneError, with how to rebuild it, if it is missing or has another digest."""
        entry = (self.manifest["payload"] | self.manifest["records"]).get(name)
        path = self.folder / name
        rebuild = f"rebuild it with: {rebuild_command(self.manifest_path)}"
        if entry is None:
            raise SnaketuneError(f"{self.manifest_path} lists no file {name!r}")
        if not path.is_file():
            raise SnaketuneError(f"{path} is missing; {rebuild}")
        unchanged = self.trusted and self._published.get(name) == _stamp(path)
        if not unchanged and (digest := digest_file(path)) != entry["digest"]:
            problem = f"is damaged: its digest is {digest}, the manifest says {entry['digest']}"
            raise SnaketuneError(f"{path} {problem}; {rebuild}")
        return path

    def files(self, prefix: str = "") -> list[Path]:
        """All payload files whose name starts with `prefix`, verified, sorted by name."""
        return [self.file(name) for name in sorted(self.manifest["payload"]) if name.startswith(prefix)]

    def for_part(self, part: int) -> "Artifact":
        """The artifact for the job of one part, which reads its share of each file. Part 1 verifies them for all."""
        return replace(self, trusted=part > 1)

    @cached_property
    def _published(self) -> dict[str, list[int]]:
        return read_json(self.manifest_path.parent / PUBLISHED, {})


def read_artifact(manifest_path: Path, payload: str) -> Artifact:
    """Read a manifest and return its artifact, with its files in `payload` beside it; SnaketuneError if unreadable."""
    try:
        manifest = parse_json(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{manifest_path} can't be read as a manifest: {error}; remove it and run again") from None
    described = [manifest.get(part) for part in ("payload", "records")] if isinstance(manifest, dict) else [None]
    if not all(isinstance(part, dict) and all(map(_is_described, part.values())) for part in described):
        problem = "is no snaketune manifest: payload or records are missing or malformed"
    elif outside := [name for part in described for name in part or () if not _is_inside(name)]:
        problem = f"lists the file {outside[0]!r}, which is outside its payload; no stage writes such a name"
    elif is_damaged(manifest):
        problem = "is damaged: its content doesn't match its digest"
    else:
        return Artifact(manifest_path, manifest, manifest_path.parent / payload)
    raise SnaketuneError(f"{manifest_path} {problem}; remove it and run again")


def _is_described(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("digest"), str)


def _is_inside(name: str) -> bool:
    """Whether a file name in a manifest stays in the payload; a manifest from elsewhere may hold any name.

    >>> [_is_inside(name) for name in ("a.arrow", "adapter/b..json", "../a", "a/../../b", "/etc/passwd", "", "a//b")]
    [True, True, False, False, False, False, False]
    """
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def read_json(path: str | Path, default: Any) -> Any:
    """Read a JSON file; `default` if there is none, it is damaged, or its value isn't of the default's type."""
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
    return content if isinstance(content, type(default)) else default


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a digest of its own content, by which a damaged one is detected."""
    # As it will be read back: numeric keys become strings in JSON.
    write_json(path, manifest | {SEAL: _own_digest(json.loads(json.dumps(manifest)))})


def is_damaged(manifest: dict[str, Any]) -> bool:
    """Whether a manifest's content doesn't match the digest in it."""
    return manifest.get(SEAL) != _own_digest(manifest)


def _own_digest(manifest: dict[str, Any]) -> str:
    return digest_json({key: value for key, value in manifest.items() if key != SEAL})


def content_digest(manifest: dict[str, Any], entries: Iterable[str] = ()) -> str:
    """The digest of what readers of the artifact can read: payload and format, not counts, records and inputs.

    So the same rows made in two ways are the same, and stages that read them needn't run again.

    Args:
        entries: names of further entries that a reader reads.
    """
    payload = {name: entry["digest"] for name, entry in manifest["payload"].items()}
    return digest_json({"payload": payload, "format": counted_entries(manifest, entries)})


def counted_entries(manifest: dict[str, Any], entries: Iterable[str] = ()) -> dict[str, Any]:
    """The part of a manifest, besides the payload, that is in its content digest.

    >>> counted_entries({"kind": "sft", "counts": {"train": {"tokens": 9}, "held_out": {}}}, ["counts.train"])
    {'kind': 'sft', 'counts': {'train': {'tokens': 9}}}
    """
    counted: dict[str, Any] = {}
    for name in (*FORMAT_KEYS, *entries):
        *above, key = name.split(".")
        source, part = manifest, counted
        for parent in above:
            source, part = source.get(parent, {}), part.setdefault(parent, {})
        if key in source:
            part[key] = source[key]
    return counted


def rebuild_command(path: Path) -> str:
    """The command that publishes an artifact again, with the config of this run: what is intact in its work folder, or else
    made again. `--forcerun` would compute it in any case. Args: path: of its manifest, or its run.json."""
    config = os.environ.get("SNAKETUNE_CONFIG", "")
    return f"rm {path} && snakemake{config and f' --configfile {config}'}"


def note_published(folder: Path, payload: Path, names: Iterable[str]) -> None:
    """Record in a result's folder the stamps of the published files, whose digests have just been verified."""
    write_json(folder / PUBLISHED, {name: _stamp(payload / name) for name in names})


def _stamp(path: Path) -> list[int]:
    """Values that change with a file's content, but not when it is renamed or linked."""
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, about.st_ino]


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Digest, bytes and (for tables) rows of every file below `folder`, by relative name."""
    from snaketune.tables import count_rows

    described = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            entry = {"digest": digest_file(path), "bytes": path.stat().st_size}
            rows = {"rows": count_rows(path)} if path.suffix == ".arrow" else {}
            described[path.relative_to(folder).as_posix()] = entry | rows
    return described
