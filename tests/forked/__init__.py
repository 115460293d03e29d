"""`python()` is a replacement of the interpreter: its `-m MODULE` runs in a fork of a process that has imported torch.

A job of the workflow takes seconds to import its libraries, and mostly less to work. The server never imports snaketune: which
code a job runs is what some tests are about. A fork has the arguments, folder, environment, standard streams, ignored signals,
limit of a file's size and exit status of a new Python process, but is no child of its caller, and its command line is the
server's; a caller that is killed takes its fork along. Tests of how Python itself starts, and of what it takes along, use
`sys.executable`.
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


@cache
def share_server() -> dict[str, str]:
    """Let the processes that this one starts use the same server as this one; return the variables that it gets.

    They are those before any test: a fork can't change some of them.
    """
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="forked-")
        os.environ[OWNER] = str(os.getpid())
    return dict(os.environ)


@cache
def python() -> Path:
    """Return the stand-in's path; start the server if no process has."""
    variables = share_server()
    folder = Path(os.environ[FOLDER])
    shim, socket = folder / "python", folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shim.exists():
            server = [sys.executable, "-P", HERE / "server.py", socket, os.environ[OWNER]]
            with (folder / "server.log").open("w") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                subprocess.Popen(server, env=variables, start_new_session=True, **streams)
            client = shlex.join(map(str, (sys.executable, "-IS", HERE / "client.py", sys.executable, socket, shim)))
            partial = folder / "python.partial"
            partial.write_text(f'#!/bin/sh\nexec {client} "$@"\n', encoding="utf-8")
            partial.chmod(0o755)
            partial.rename(shim)
    return shim
