"""Snakemake's command line, in a fork of a process that has imported it and what jobs import."""

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import python


def environment() -> dict[str, str]:
    """The variables for a run of the workflow, whose jobs are forks too."""
    return os.environ | {"PATH": f"{python().parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def snakemake(arguments: list[str], folder: Path, umask: int = -1) -> tuple[int, str]:
    """Run `snakemake` with these arguments in `folder`; return its exit status and all that it printed. Args: umask: -1: as it
    is here."""
    command = [python(), "-m", "snakemake", *arguments]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=environment(), umask=umask, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout
