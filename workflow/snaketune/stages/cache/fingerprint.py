"""Fingerprints: the digest of everything that shapes a result, which names its work folder.

Of spec and inputs everything counts unless the stage's `cache_keys` are more precise: they resolve `precision: auto` on this
machine, or ignore which rows hold the pairs. `results/.work/.digests/` holds digests of external files, so that a file isn't
read each time that jobs are planned. They are valid while size, times and inode are unchanged; only the kernel sets the time of
the last inode change (ctime).
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file
from snaketune.locations import File, facts_of
from snaketune.stages.cache.attempt import stamp_of

# Reading a smaller file is faster than looking its digest up.
CACHED_BYTES = 1 << 20
# Two changes within one tick of the file system's clock leave the same stamp; a tick is at most two seconds.
TICK_NS = 2_000_000_000
# Roles whose files are read as a folder, in which a library finds files by name.
FOLDERS = ("base", "tasks", "task_data")
# A file, and its digest or its entry in a fingerprint.
Entry = tuple[File, str]


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


def fingerprint(key: Key, inputs: dict[str, list[str]], versions: dict[str, str] | None) -> str:
    """The fingerprint, 32 hex digits. Args: versions: None if they don't count."""
    parts = {"stage": key.stage, "spec": key.spec, "inputs": inputs, "code": key.code, "device": key.device}
    return digest_json(parts | ({"versions": versions} if versions is not None else {}))[:32]


def read_artifacts(artifacts: dict[str, list[Artifact]], by: dict[str, str]) -> dict[str, list[str]]:
    """The digests of the artifacts by role, for the fingerprint. Args: by: as in `Key`."""
    return {role: [_counted(artifact, by.get(role)) for artifact in inputs] for role, inputs in artifacts.items()}


def _counted(artifact: Artifact, entry: str | None) -> str:
    if entry is None:
        return artifact.counted
    if entry not in artifact.provenance:
        raise SnaketuneError(
            f"{artifact.manifest_path} has no entry {entry!r}; rebuild it with: {rebuild_command(artifact.manifest_path)}"
        )
    return str(artifact.provenance[entry])


def read_files(files: dict[str, list[File]], work_root: Path, *, shared: bool = False) -> dict[str, list[Entry]]:
    """The external files with their digests by role; of remote ones, what the store says of their content now.

    SnaketuneError if one doesn't exist. Args: shared: whether other jobs read the same files: then each takes the digests that
    were cached.
    """
    facts = facts_of(chain(*files.values()), fresh=True)
    for role, paths in files.items():
        for path in paths:
            if isinstance(path, Path) and not path.is_file():
                raise SnaketuneError(f"{role}: {path} is not a file")
    of_local = cached_digest if shared else compute_digest

    def digest(file: File) -> str:
        return of_local(file, work_root) if isinstance(file, Path) else facts[file.url].identity

    return {role: [(path, digest(path)) for path in paths] for role, paths in files.items()}


def cached_entries(role: str, paths: Iterable[File], work_root: Path) -> list[Entry]:
    """A role's files as entries of a fingerprint, by cached digests of those that haven't changed."""
    paths = list(paths)
    facts = facts_of(paths)

    def digest(file: File) -> str:
        return cached_digest(file, work_root) if isinstance(file, Path) else facts[file.url].identity

    return fingerprint_entries(role, [(path, digest(path)) for path in paths])


def fingerprint_entries(role: str, digests: list[Entry]) -> list[Entry]:
    """A role's files as entries of a fingerprint: the digest of each, and in a role read as a folder its name below it.

    The folder is the innermost one that holds all of them, so moving it as a whole changes nothing.
    """
    if role not in FOLDERS or not digests:
        return digests
    # Only corpora have remote files.
    local = [(path, path.absolute(), digest) for path, digest in digests if isinstance(path, Path)]
    folder = Path(os.path.commonpath([absolute.parent for _, absolute, _ in local]))
    return [(path, f"{digest} {absolute.relative_to(folder).as_posix()}") for path, absolute, digest in local]


def cached_digest(path: Path, work_root: Path) -> str:
    """The digest of a file, from the cache if the file hasn't changed; SnaketuneError if it can't be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        if path.stat().st_size < CACHED_BYTES:
            return digest_file(path)
        cached = json.loads(_cache_file(path, work_root).read_text(encoding="utf-8"))
        if cached["stamp"] == [*stamp_of(path)]:
            return cached["digest"]
    return compute_digest(path, work_root)


def compute_digest(path: Path, work_root: Path) -> str:
    """Read a file and return its digest, which is cached unless the file has just changed."""
    before = stamp_of(path)
    digest = digest_file(path)
    if (
        before
        and before[0] >= CACHED_BYTES
        and before == stamp_of(path)
        and time.time_ns() - max(before[1:3]) > TICK_NS
    ):
        cache_file = _cache_file(path, work_root)
        partial = cache_file.with_name(f".{cache_file.name}.{os.getpid()}.partial")
        # If the folder can't be written to, the file is read again next time.
        with suppress(OSError):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"path": str(path), "stamp": before, "digest": digest}), encoding="utf-8")
            partial.replace(cache_file)
    return digest


def _cache_file(path: Path, work_root: Path) -> Path:
    return work_root / ".digests" / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.json"
