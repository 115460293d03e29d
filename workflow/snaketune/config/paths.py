"""Paths in a config: normalized, so that `./data/x` and `data//x` are one file to every job, and without special characters."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from snaketune.errors import SnaketuneError

# Without braces and control characters, which Snakemake's wildcards and shells would interpret.
PLAIN_PATH = re.compile(r"[^{}\x00-\x1f]+")


def check_plain(key: str, path: str) -> str:
    """Return the path; SnaketuneError if it contains braces, which Snakemake would expand, or control characters. Args: key:
    the config key or folder that it comes from, for the message."""
    if not PLAIN_PATH.fullmatch(path):
        raise SnaketuneError(
            f"{key}: {path!r} contains braces or control characters, which Snakemake can't handle; rename it"
        )
    return path


def is_local_path(path: str) -> bool:
    """Whether a path can't be a Hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def normalized_path(path: str) -> str:
    """Normalize a path: relative if it is inside the working directory, without `./`, `//` and a trailing `/`.

    A path that doesn't exist stays as it is: it may be a Hub id, or be shown in an error message.

    >>> normalized_path("Qwen/Qwen2.5-0.5B"), normalized_path("./"), normalized_path(".//")
    ('Qwen/Qwen2.5-0.5B', '.', '.')
    """
    try:
        short = os.path.normpath(path)
        # With a symbolic link, `a/link/../b` isn't `a/b`.
        if not path or not Path(path).samefile(short):
            return path
    except (OSError, ValueError):
        return path
    short = short.removeprefix(f"{Path.cwd()}{os.sep}")
    # Programs take a name that begins with a dash for an option.
    return f"./{short}" if short.startswith("-") else short


def files_at(path: str) -> list[str]:
    """The files of a folder, or those that a pattern matches, in the order of their names; a path of neither kind unchanged.

    Hidden files and those that begin with `_`, as finished jobs of other programs leave them, aren't data. ValueError: no file.
    """
    place = Path(path)
    is_pattern = not place.exists() and any(character in path for character in "*?[")
    if not (place.is_dir() or is_pattern):
        return [path]
    anchor = Path(place.anchor)
    found = anchor.glob(str(place.relative_to(anchor))) if is_pattern else place.rglob("*")
    files = [str(file) for file in found if file.is_file() and not file.name.startswith((".", "_"))]
    if not files:
        raise ValueError(
            f"{path!r} {'matches' if is_pattern else 'has'} no file; paths are relative to the working directory"
        )
    return sorted(files)


LocalPath = Annotated[str, AfterValidator(normalized_path)]
