"""One spelling for a path, so that `./data/x` and `data//x` are the same file to every job."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from snaketune.errors import SnaketuneError

# What no shell and no wildcard pattern of Snakemake takes for something else.
PLAIN_PATH = re.compile(r"[^{}\x00-\x1f]+")


def check_plain(key: str, path: str) -> str:
    """The path itself, also one that was found in a folder and not given; SnaketuneError if Snakemake would fill in its braces.

    Args:
        key: who names it, for the message.
    """
    if not PLAIN_PATH.fullmatch(path):
        raise SnaketuneError(
            f"{key}: {path!r} holds braces or control characters, which Snakemake can't take; rename it"
        )
    return path


def normalized_path(path: str) -> str:
    """The path as short as it goes: relative where it lies in the working directory, without `./`, `//` and `/` at its end.

    What isn't there stays as it was written: a Hub id, or a path that a message has to show.

    >>> normalized_path("Qwen/Qwen2.5-0.5B"), normalized_path("./"), normalized_path(".//")
    ('Qwen/Qwen2.5-0.5B', '.', '.')
    """
    try:
        short = os.path.normpath(path)
        # `a/link/../b` needn't be `a/b`.
        if not path or not Path(path).samefile(short):
            return path
    except (OSError, ValueError):
        return path
    short = short.removeprefix(f"{Path.cwd()}{os.sep}")
    # To a program, a name that begins with a dash is an option.
    return f"./{short}" if short.startswith("-") else short


LocalPath = Annotated[str, AfterValidator(normalized_path)]
