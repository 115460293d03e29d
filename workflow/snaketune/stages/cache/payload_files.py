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
from snaketune.files import READ_ONLY, digest_file, is_linked, set_mode, sync


def place(source: Path, target: Path) -> None:
    """Link a file if it is one that is linked, read-only and on the same file system; otherwise copy it."""
    linked = is_linked(source)
    if linked and not source.is_symlink() and not source.stat().st_mode & 0o222:
        with suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    if linked:
        set_mode(target, stat.S_IMODE(target.stat().st_mode) & READ_ONLY)


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
