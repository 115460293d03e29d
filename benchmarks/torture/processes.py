"""The processes that belong to a folder, even orphans; listing and killing them.

On its own: a copy of this file is imported by processes that are to kill all of them at a chosen moment (meddling.py).
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

NAMED_BY = "TORTURE_CHAIN"


def everything_in(folder: Path, what: str = "") -> list[int]:
    """Return all processes of the chain in `folder`, driver first, by a variable that every child inherits.

    Args:
        what: only those whose command line contains this.
    """
    found = [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get(NAMED_BY) == str(folder)
        and what in f"{' '.join(process.info['cmdline'] or ())} "
        and process.pid != os.getpid()
    ]
    return sorted(found)


def send(processes: list[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def kill(processes: list[int]) -> None:
    """Kill processes like a power cut: stop all first, so that none sees another die."""
    send(processes, signal.SIGSTOP)
    send(processes, signal.SIGKILL)


def kill_chain(folder: Path) -> None:
    """Kill all processes of a chain, including those that start meanwhile."""
    while there := everything_in(folder):
        kill(there)
        time.sleep(0.01)


def wait_for(what: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
