"""Digests of files from outside, kept so that a file is read once and not at every look at the plan.

A kept digest holds as long as the file's size, times and inode do. The time of the last change (ctime) is the kernel's, which
`cp -p` and `rsync -t` can't set, whatever time of modification they bring along.
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

# Smaller files are read faster than a note of them would be looked up.
CACHED_BYTES = 1 << 20
# Two changes within one tick of the file system's clock leave the same stamp; ticks are up to two seconds long.
TICK_NS = 2_000_000_000
# Roles whose files are read as a folder, where a name tells a library what a file is for.
FOLDERS = ("base", "tasks", "task_data")


def fingerprint_entries(role: str, paths: Iterable[Path], digest: Callable[[Path], str]) -> list[str]:
    """What a role's files are in a fingerprint: each one's digest and, in a role read as a folder, its name below it.

    The folder is the innermost one that holds all of them, so that moving it as a whole changes nothing.
    """
    paths = list(paths)
    if role not in FOLDERS or not paths:
        return [digest(path) for path in paths]
    folder = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return [f"{digest(path)} {path.absolute().relative_to(folder).as_posix()}" for path in paths]


def digest_in(entry: str) -> str:
    """The digest in one of `entries`."""
    return entry.split(" ", 1)[0]


def cached_digest(path: Path, work_root: Path) -> str:
    """The digest of a file's content, from `work_root/.digests` if the file is the one that was read then.

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
    """The digest of a file's content, read now; it is kept unless the file has just changed."""
    before = _stamp(path)
    digest = digest_file(path)
    if before and before[0] >= CACHED_BYTES and before == _stamp(path) and time.time_ns() - max(before[1:3]) > TICK_NS:
        kept = _entry(path, work_root)
        partial = kept.with_name(f".{kept.name}.{os.getpid()}.partial")
        # A folder that can't be written to costs the time of reading again, and nothing else.
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"path": str(path), "stamp": before, "digest": digest}), encoding="utf-8")
            partial.replace(kept)
    return digest


def _entry(path: Path, work_root: Path) -> Path:
    return work_root / ".digests" / f"{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]}.json"


def _stamp(path: Path) -> list[int]:
    return list(stamps_of([path])[str(path)])
