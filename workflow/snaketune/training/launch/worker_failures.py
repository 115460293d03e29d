"""What launched processes died of, written down by each, so that the first failure is told and not its echo in the others."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

from snaketune.artifacts.manifest import write_json

FOLDER = "failed"
# What a process says that has lost another one: torch.distributed's own errors, and what gloo and NCCL raise as RuntimeError.
ECHOES = ("DistBackendError", "DistNetworkError", "DistStoreError")
ECHOED = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


def clear_failures(state: Path) -> None:
    """Before an attempt: what an earlier one died of is history."""
    shutil.rmtree(state / FOLDER, ignore_errors=True)


def record_failure(state: Path, error: BaseException, told: str | None) -> None:
    """Called in a process that dies.

    Args:
        told: the error as a sentence for people, where there is one.
    """
    folder = state / FOLDER
    rank = int(os.environ.get("RANK", 0))
    kind = type(error).__name__
    report = {
        "rank": rank,
        "of": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "time": time.time(),
        "said": told or f"{kind}: {error}",
        "echo": not told and (kind in ECHOES or any(words in str(error) for words in ECHOED)),
    }
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{rank}.json", report)
    except OSError:
        # A full disk; the log has it.
        pass


def first_failure(state: Path) -> str:
    """What the first process to fail said, and which it was; nothing where none said anything."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((state / FOLDER).glob("[0-9]*.json"))]
    if not reports:
        return ""
    first = min(reports, key=lambda report: (report["echo"], report["time"]))
    if first["echo"]:
        return (
            "one of its processes was killed (which: `exitcode`, above; out of memory, perhaps), or its node is gone. Run "
            "again to resume"
        )
    which = f"process {first['rank']} of {first['of']} on {first['host']}: " if first["of"] > 1 else ""
    return f"{which}{first['said']}"
