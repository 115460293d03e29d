"""Digests of external files, cached so that a file isn't read again each time that jobs are planned.

A cached digest is valid while the file's size, times and inode are unchanged. The time of the last inode change (ctime) is set
by the kernel; `cp -p` and `rsync -t` can't set it, unlike the time of modification.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from snaketune.artifacts.digests import digest_file
from snaketune.stages.cache.attempt import stamps_of

# Reading a smaller file is faster than looking its digest up.
CACHED_BYTES = 1 << 20
# Two changes within one tick of the file system's clock leave the same stamp; a tick is at most two seconds.
TICK_NS = 2_000_000_000
# Roles whose files are read as a folder, in which a library finds files by name.
FOLDERS = ("base", "tasks", "task_data")


def fingerprint_entries(role: str, paths: Iterable[Path], digest: Callable[[Path], str]) -> list[str]:
    """Return a role's files as entries of a fingerprint: the digest of each, and in a role read as a folder its name below it.

    The folder is the innermost one that holds all of them, so moving it as a whole changes nothing.
    """
    paths = list(paths)
    if role not in FOLDERS or not paths:
        return [digest(path) for path in paths]
    folder = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return [f"{digest(path)} {path.absolute().relative_to(folder).as_posix()}" for path in paths]


def digest_in(entry: str) -> str:
    """Return the digest in an entry of `fingerprint_entries`."""
    return entry.split(" ", 1)[0]


def cached_digest(path: Path, work_root: Path) -> str:
    """Return the digest of a file's content, from `work_root/.digests` if the file hasn't changed since.

    Raises:
        SnaketuneError: the file can't be read.
    """
    try:
        if path.stat().st_size < CACHED_BYTES:
            return digest_file(path)
        entry = json.loads(_entry(path, work_root).read_text(encoding="utf-8"))
        if entry["stamp"] == _stamp(path):
            return entry["digest"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return compute_digest(path, work_root)


def compute_digest(path: Path, work_root: Path) -> str:
    """Read a file and return the digest of its content, which is cached unless the file has just changed."""
    before = _stamp(path)
    digest = digest_file(path)
    if before and before[0] >= CACHED_BYTES and before == _stamp(path) and time.time_ns() - max(before[1:3]) > TICK_NS:
        cache_file = _entry(path, work_root)
        partial = cache_file.with_name(f".{cache_file.name}.{os.getpid()}.partial")
        # If the folder can't be written to, the file is read again next time.
        with contextlib.suppress(OSError):
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"path": str(path), "stamp": before, "digest": digest}), encoding="utf-8")
            partial.replace(cache_file)
    return digest


def _entry(path: Path, work_root: Path) -> Path:
    return work_root / ".digests" / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]}.json"


def _stamp(path: Path) -> list[int]:
    return list(stamps_of([path])[str(path)])
