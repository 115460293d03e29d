"""Fingerprints: the digest of all that shapes a result, under which its work folder lies.

Of (stage, resolved spec, what can be read from each input, code, kind of device, and versions of libraries where they count).
"""

from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.stages.outside import entries, read_outside
from snaketune.stages.table import option


def read_inputs(
    artifacts: dict[str, list[Artifact]], files: dict[str, list[Path]], work_root: Path
) -> dict[str, list[str]]:
    """What a fingerprint holds of every input, by role: digests of what can be read from each.

    Raises:
        SnaketuneError: a file from outside isn't there.
    """
    inputs = {role: [artifact.content for artifact in found] for role, found in artifacts.items()}
    for role, found in files.items():
        for path in found:
            if not path.is_file():
                raise SnaketuneError(f"{option(role)}: {path} is not a file")
        inputs[role] = entries(role, found, lambda path: read_outside(path, work_root))
    return inputs


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
