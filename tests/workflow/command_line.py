"""Snakemake's command line."""

import os
import subprocess
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """The variables for a run of the workflow, whose jobs find this Python first."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def snakemake(arguments: list[str], folder: Path, umask: int = -1) -> tuple[int, str]:
    """Run `snakemake` with these arguments in `folder`; return its exit status and all that it printed. Args: umask: -1: as it
    is here."""
    command = [sys.executable, "-m", "snakemake", *arguments]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=environment(), umask=umask, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout
