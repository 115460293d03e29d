"""Fingerprints: the digest of everything that shapes a result, which names its work folder.

It covers stage, spec, what can be read from each input, code, kind of device, and versions of libraries if they count. Of spec
and inputs everything counts unless the stage's `key_module` is more precise: it resolves `precision: auto` on this machine, or
ignores which rows hold the pairs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.external_files import compute_digest, fingerprint_entries


@dataclass(frozen=True, kw_only=True)
class Key:
    """The cache key of a result, without its inputs.

    Attributes:
        spec: the part of the spec that counts, as plain JSON.
        code: digest of the stage's code.
        device: kind of device that it computes on; empty if that doesn't matter.
        by: by role, the manifest entry that counts instead of the artifact's content.
    """

    stage: str
    spec: dict[str, Any]
    code: str
    device: str = ""
    by: dict[str, str] = field(default_factory=dict)


def read_artifacts(artifacts: dict[str, list[Artifact]], by: dict[str, str]) -> dict[str, list[str]]:
    """Return the digests of the artifacts by role, for the fingerprint. Args: by: as in `Key`."""
    return {
        role: [_counted(artifact, by.get(role)) for artifact in role_artifacts]
        for role, role_artifacts in artifacts.items()
    }


def _counted(artifact: Artifact, entry: str | None) -> str:
    if entry is None:
        return artifact.content
    if entry not in artifact.manifest:
        raise SnaketuneError(
            f"{artifact.manifest_path} has no entry {entry!r}; rebuild it with: {rebuild_command(artifact.manifest_path)}"
        )
    return str(artifact.manifest[entry])


def read_files(files: dict[str, list[Path]], work_root: Path) -> dict[str, list[str]]:
    """Return the digests of the external files by role, for the fingerprint.

    Raises:
        SnaketuneError: a file doesn't exist.
    """
    for role, path in ((role, path) for role, paths in files.items() for path in paths):
        if not path.is_file():
            raise SnaketuneError(f"{role}: {path} is not a file")
    return {
        role: fingerprint_entries(role, paths, lambda path: compute_digest(path, work_root))
        for role, paths in files.items()
    }


def fingerprint(
    stage: str,
    spec: dict[str, Any],
    inputs: dict[str, list[str]],
    code: str,
    device: str,
    versions: dict[str, str | None] | None,
) -> str:
    """Return the fingerprint, 32 hex digits. Args: versions: None if they don't count."""
    parts = {"stage": stage, "spec": spec, "inputs": inputs, "code": code, "device": device}
    return digest_json(parts | ({"versions": versions} if versions is not None else {}))[:32]
