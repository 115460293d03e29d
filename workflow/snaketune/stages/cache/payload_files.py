"""Payload files in work folders and published results: their modes, how they are published, and where intact copies are.

Small files are copied where they are published, so that an edit of a published one, such as `generation_config.json`, leaves
the cached one as it is. Tables, weights and large files are hard links, which cost no space. They are read-only, since an edit
in place would change all links. Modes follow the umask, as the mode of the folder shows it: some libraries write files that
only their owner can read.
"""

import glob
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, sync_names

LINKED_SUFFIXES = (".arrow", ".gguf", ".safetensors")
# Larger than a tokenizer, the largest file that people edit.
COPIED_BYTES = 1 << 26
WRITABLE, READ_ONLY = 0o666, 0o444


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
            _set_mode(path, mode if path.is_dir() else mode & (linked if is_linked(path) else WRITABLE))


def _set_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        # Files of other users and some file systems refuse it.
        with suppress(OSError):
            path.chmod(mode)


def place(source: Path, target: Path) -> None:
    """Link a file if it is one that is linked, read-only and on the same file system; otherwise copy it."""
    linked = is_linked(source)
    if linked and not source.is_symlink() and not source.stat().st_mode & 0o222:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    if linked:
        _set_mode(target, stat.S_IMODE(target.stat().st_mode) & READ_ONLY)


def restore(path: Path, entry: dict[str, Any], results: Path) -> Path | None:
    """Replace a file by an intact one of the same name anywhere in the results folder. Return that one; None if there is none.

    Args:
        entry: digest and bytes of the file, from the manifest.
    """
    partial = path.with_name(f".{path.name}.partial")
    for other in results.rglob(glob.escape(path.name)):
        try:
            is_intact = other.stat().st_size == entry.get("bytes") and digest_file(other) == entry["digest"]
        except (OSError, SnaketuneError):
            # Unreadable, or removed by another process.
            continue
        if is_intact:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            # A full disk ends the job: the result isn't lost.
            place(other, partial)
            sync(partial)
            partial.replace(path)
            return other
    return None


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
