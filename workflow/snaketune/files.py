"""Files that survive a power cut, their modes, and their digests (XXH3-128, at memory speed)."""

import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from snaketune.errors import SnaketuneError

LINKED_SUFFIXES = (".arrow", ".gguf", ".safetensors")
# Larger than a tokenizer, the largest file that people edit.
COPIED_BYTES = 1 << 26
WRITABLE, READ_ONLY = 0o666, 0o444


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


def sync_folder(folder: Path) -> None:
    """Flush all files below `folder` to disk, so that a manifest written afterwards is true after a power cut too."""
    for path in (folder, *folder.rglob("*")):
        if path.is_file():
            sync(path)
        elif path.is_dir():
            sync_names(path)


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def is_linked(path: Path) -> bool:
    """Whether a file is linked where it is published, if links can be made, and read-only."""
    return path.suffix in LINKED_SUFFIXES or path.stat().st_size > COPIED_BYTES


def set_modes(folder: Path, linked: int = READ_ONLY) -> None:
    """Set the modes of all that is below a folder to those that the umask leaves. Args: linked: of files that are linked."""
    if folder.is_symlink() or not folder.is_dir():
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            set_mode(path, mode if path.is_dir() else mode & (linked if is_linked(path) else WRITABLE))


def set_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        # Files of other users and some file systems refuse it.
        with suppress(OSError):
            path.chmod(mode)
