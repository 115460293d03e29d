"""Fingerprints: the digest of all that shapes a result, under which its work folder lies.

Of (stage, what counts of its spec, what can be read from each input, code, kind of device, and versions of libraries where they
count). What counts is the spec as it is and the content of each input, unless the stage's `key_module` knows better: what
`precision: auto` comes to on this machine, or that pairs are the same whatever rows they lie in.
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
    """What shapes a result besides its inputs.

    Attributes:
        spec: what counts of the spec, as plain JSON.
        code: digest of the stage's code.
        device: kind of device that it computes on; empty where it doesn't matter.
        by: roles of artifacts that count by one entry of their manifest in the place of their content, and which.
    """

    stage: str
    spec: dict[str, Any]
    code: str
    device: str = ""
    by: dict[str, str] = field(default_factory=dict)


def read_artifacts(artifacts: dict[str, list[Artifact]], by: dict[str, str]) -> dict[str, list[str]]:
    """What a fingerprint holds of every artifact, by role. Args: by: as in `Key`."""
    return {role: [_counted(artifact, by.get(role)) for artifact in found] for role, found in artifacts.items()}


def _counted(artifact: Artifact, entry: str | None) -> str:
    if entry is None:
        return artifact.content
    if entry not in artifact.manifest:
        raise SnaketuneError(
            f"{artifact.manifest_path} doesn't tell its {entry}; rebuild it with: {rebuild_command(artifact.manifest_path)}"
        )
    return str(artifact.manifest[entry])


def read_files(files: dict[str, list[Path]], work_root: Path) -> dict[str, list[str]]:
    """What a fingerprint holds of the files from outside, by role.

    Raises:
        SnaketuneError: a file isn't there.
    """
    for role, path in ((role, path) for role, found in files.items() for path in found):
        if not path.is_file():
            raise SnaketuneError(f"{role}: {path} is not a file")
    return {role: fingerprint_entries(role, found, lambda path: compute_digest(path, work_root)) for role, found in files.items()}


def fingerprint(
    stage: str,
    spec: dict[str, Any],
    inputs: dict[str, list[str]],
    code: str,
    device: str,
    versions: dict[str, str | None] | None,
) -> str:
    """32 hex digits. Args: versions: None where they don't count."""
    parts = {"stage": stage, "spec": spec, "inputs": inputs, "code": code, "device": device}
    return digest_json(parts | ({"versions": versions} if versions is not None else {}))[:32]
