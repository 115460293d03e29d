"""`python()` is a replacement of the interpreter: its `-m MODULE` runs as a fork (`snaketune.stages.host.forks`).

Its server has also imported Snakemake, and is shared by all processes of a test run. Jobs find it by their environment, so that
no run starts one of its own. Tests of how Python itself starts use `sys.executable`.
"""

import fcntl
import os
import shlex
import sys
import tempfile
from functools import cache
from pathlib import Path

from snaketune.stages.host import forks

# The folder that all processes of a test run share; the server ends when the last one that holds its FIFO open does.
FOLDER = "SNAKETUNE_TESTS_FORKED"
HERE = Path(__file__).parent


@cache
def share_server() -> dict[str, str]:
    """Let the processes that this one starts use the same server as this one; return the variables that it gets.

    They are those before any test: a fork can't change some of them.
    """
    if FOLDER not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="forked-"))
        os.environ[FOLDER] = str(folder)
        os.mkfifo(folder / "owner")
        # Both ends, since opening one waits for the other. This process never closes it.
        os.open(folder / "owner", os.O_RDWR)
    return dict(os.environ)


@cache
def python() -> Path:
    """Return the stand-in's path; start the server if no process has."""
    variables = share_server()
    folder = Path(os.environ[FOLDER])
    shim = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shim.exists():
            with (folder / "server.log").open("w") as log, (folder / "owner").open() as owner:
                address = forks.start_server([sys.executable, "-P", str(HERE / "server.py")], variables, owner, log)
            client = shlex.join(map(str, (sys.executable, "-IB", HERE / "client.py", forks.__file__, sys.executable)))
            partial = folder / "python.partial"
            partial.write_text(f'#!/bin/sh\nexport {forks.VARIABLE}={address}\nexec {client} "$@"\n', encoding="utf-8")
            partial.chmod(0o755)
            partial.rename(shim)
    return shim
