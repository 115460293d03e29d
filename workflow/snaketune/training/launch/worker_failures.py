"""Errors of failed workers: each records its own, so that the first failure is reported and not its echo in the others."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

from snaketune.artifacts.manifest import write_json

FOLDER = "failed"
# Errors of a process that lost a peer: torch.distributed's own types, and messages of RuntimeErrors from gloo and NCCL.
ECHOES = ("DistBackendError", "DistNetworkError", "DistStoreError")
ECHOED = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


def clear_failures(state: Path) -> None:
    """Remove the records of an earlier attempt."""
    shutil.rmtree(state / FOLDER, ignore_errors=True)


def record_failure(state: Path, error: BaseException, message: str | None) -> None:
    """Record the error that ends this process.

    Args:
        message: the error as text for the user; None for an unexpected error.
    """
    folder = state / FOLDER
    rank = int(os.environ.get("RANK", 0))
    kind = type(error).__name__
    record = {
        "rank": rank,
        "of": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "time": time.time(),
        "message": message or f"{kind}: {error}",
        "echo": not message and (kind in ECHOES or any(words in str(error) for words in ECHOED)),
    }
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{rank}.json", record)
    except OSError:
        # The disk may be full; the log has the error too.
        pass


def first_failure(state: Path) -> str:
    """The message of the first process that failed, with its rank and host; "" if no process recorded an error."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((state / FOLDER).glob("[0-9]*.json"))]
    if not records:
        return ""
    first = min(records, key=lambda record: (record["echo"], record["time"]))
    if first["echo"]:
        return (
            "one of its processes was killed (`exitcode` above names it; perhaps it ran out of memory), or its node is gone. "
            "Run again to resume"
        )
    which = f"process {first['rank']} of {first['of']} on {first['host']}: " if first["of"] > 1 else ""
    return f"{which}{first['message']}"
