"""Fingerprints: the digest of all that shapes a result, under which its work folder lies.

Of (stage, resolved spec, what can be read from each input, code, kind of device, and versions of libraries where they count).
"""

from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.stages.outside import entries, read_outside
from snaketune.stages.work import WORK_ROOT


def fingerprint_of(
    stage: str,
    spec: dict[str, Any],
    artifacts: dict[str, list[Artifact]],
    files: dict[str, list[Path]],
    code: str,
    device: str = "",
    versions: dict[str, str | None] | None = None,
    work_root: Path = WORK_ROOT,
) -> tuple[str, dict[str, list[str]]]:
    """The fingerprint (32 hex digits) and what it holds of every input by role.

    Raises:
        SnaketuneError: a file from outside isn't there.
    """
    inputs = {role: [artifact.content for artifact in found] for role, found in artifacts.items()}
    for role, found in files.items():
        for path in found:
            if not path.is_file():
                raise SnaketuneError(f"--{role.replace('_', '-')}: {path} is not a file")
        inputs[role] = entries(role, found, lambda path: read_outside(path, work_root))
    return fingerprint(stage, spec, inputs, code, device, versions), inputs


def fingerprint(
    stage: str,
    spec: dict[str, Any],
    inputs: dict[str, list[str]],
    code: str,
    device: str,
    versions: dict[str, str | None] | None,
) -> str:
    parts = {"stage": stage, "spec": spec, "inputs": inputs, "code": code, "device": device}
    return digest_json(parts | ({"versions": versions} if versions is not None else {}))[:32]
