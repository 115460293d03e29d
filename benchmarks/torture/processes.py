"""The processes that belong to a folder, even orphans; listing and killing them.

On its own: a copy of this file is imported by processes that are to kill all of them at a chosen moment (meddling.py).
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

NAMED_BY = "TORTURE_CHAIN"


def everything_in(folder: Path, what: str = "") -> list[int]:
    """Return all processes of the chain in `folder`, driver first, by a variable that every child inherits.

    Args:
        what: only those whose command line contains this.
    """
    mark = f"{NAMED_BY}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                found += [int(entry.name)] if what in command else []
        except OSError:
            continue
    return sorted(found)


def send(processes: list[int], number: int) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def kill(processes: list[int]) -> None:
    """Kill processes like a power cut: stop all first, so that none sees another die."""
    send(processes, signal.SIGSTOP)
    send(processes, signal.SIGKILL)


def kill_chain(folder: Path) -> None:
    """Kill all processes of a chain, including those that start meanwhile."""
    while there := [process for process in everything_in(folder) if not _is_dead(process)]:
        kill(there)
        time.sleep(0.01)


def _is_dead(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(what: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
