"""Files that survive a power cut, and their digests (XXH3-128, at memory speed)."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from snaketune.errors import SnaketuneError


def digest_file(path: Path) -> str:
    """Return the XXH3-128 digest of a file's content, as `xxh3:<32 hex digits>`."""
    try:
        with path.open("rb") as file:
            return f"xxh3:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"
    except OSError as error:
        raise SnaketuneError(f"{path} can't be read: {error.strerror}") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys and an indent of two, atomically and flushed, so that a power cut leaves no half a file."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # Mode x never writes through a link that another user put there.
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Flush the entries of a folder to disk: which names exist, not the files' content."""
    entries = os.open(folder, os.O_RDONLY)
    # Some network file systems don't support it.
    with suppress(OSError):
        os.fsync(entries)
    os.close(entries)
