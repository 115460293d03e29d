"""`python()` is a replacement of the interpreter: its `-m MODULE` runs in a fork of a process that has imported torch.

A job of the workflow takes seconds to import its libraries, and mostly less to work. The server never imports snaketune: which
code a job runs is what some tests are about. A fork has the arguments, folder, environment, standard streams, ignored signals
and exit status of a new Python process. Tests of how Python itself starts, and of kills, use `sys.executable`.
"""

import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

# The folder of the server, which all processes of a test run share, and the id of the process with which it ends.
FOLDER, OWNER = "SNAKETUNE_TESTS_FORKED", "SNAKETUNE_TESTS_OWNER"
HERE = Path(__file__).parent


def share_server() -> None:
    """Let the processes that this one starts use the same server as this one."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="forked-")
        os.environ[OWNER] = str(os.getpid())


@cache
def python() -> Path:
    """Return the stand-in's path; start the server if no process has."""
    share_server()
    folder = Path(os.environ[FOLDER])
    shim, socket = folder / "python", folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shim.exists():
            server = [sys.executable, "-I", HERE / "server.py", socket, os.environ[OWNER]]
            with (folder / "server.log").open("w") as log:
                subprocess.Popen(server, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            client = shlex.join(map(str, (sys.executable, "-IS", HERE / "client.py", sys.executable, socket, shim)))
            partial = folder / "python.partial"
            partial.write_text(f'#!/bin/sh\nexec {client} "$@"\n', encoding="utf-8")
            partial.chmod(0o755)
            partial.rename(shim)
    return shim
