"""How workers end: each records its error, or the main one its preemption, for the launcher to report.

state/failed/RANK.json    the errors, so that the first failure is reported and not its echo in the others
state/preempted.json      step and reason of a preemption; the launcher requeues the job if the time limit was the reason
"""

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from snaketune.cluster.job_endings import requeue_job
from snaketune.errors import SnaketuneError
from snaketune.files import write_json

FAILED, PREEMPTED = "failed", "preempted.json"
# Wait for SLURM to end the job that it requeues.
SECONDS_TO_END = 120
# Errors of a process that lost a peer: torch.distributed's own types, and messages of RuntimeErrors from gloo and NCCL.
ECHOES = ("DistBackendError", "DistNetworkError", "DistStoreError")
ECHOED = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


class Preempted(SnaketuneError):
    """The training ended early, and its checkpoint is complete."""


def clear_endings(state: Path) -> None:
    """Remove the records of an earlier attempt."""
    shutil.rmtree(state / FAILED, ignore_errors=True)
    (state / PREEMPTED).unlink(missing_ok=True)


def record_failure(state: Path, error: BaseException, message: str | None) -> None:
    """Record the error that ends this process, with its message for the user; None for an unexpected error."""
    rank, kind = int(os.environ.get("RANK", 0)), type(error).__name__
    record = {
        "rank": rank,
        "of": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "time": time.time(),
        "message": message or f"{kind}: {error}",
        "echo": not message and (kind in ECHOES or any(words in str(error) for words in ECHOED)),
    }
    # The disk may be full; the log has the error too.
    with suppress(OSError):
        (state / FAILED).mkdir(exist_ok=True)
        write_json(state / FAILED / f"{rank}.json", record)


def first_failure(state: Path) -> str:
    """The message of the first process that failed, with its rank and host; "" if none recorded an error other than that a
    peer was lost, which was killed then, or whose node is gone."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((state / FAILED).glob("[0-9]*.json"))]
    first = min((record for record in records if not record["echo"]), key=lambda record: record["time"], default=None)
    if first is None:
        return ""
    which = f"process {first['rank']} of {first['of']} on {first['host']}: " if first["of"] > 1 else ""
    return f"{which}{first['message']}"


def record_preemption(state: Path, step: int, reason: str, is_main: bool) -> Preempted:
    """Return the error that ends a preempted worker; the main one records the step and the reason, "signal" or "deadline"."""
    if is_main:
        write_json(state / PREEMPTED, {"step": step, "reason": reason})
    return Preempted(f"stopped after step {step}, with a checkpoint")


def raise_if_preempted(state: Path) -> None:
    """Raise Preempted if the workers, which have ended, recorded a preemption. If the time limit was the reason and SLURM
    requeues the job, SLURM usually ends this process before."""
    try:
        record = json.loads((state / PREEMPTED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    stopped = f"stopped after step {record['step']}, with a checkpoint, since"
    if record["reason"] == "signal":
        raise Preempted(f"{stopped} it was interrupted (Ctrl-C, a closed terminal, or SIGTERM); run again to resume")
    near = f"{stopped} the job's time limit is near"
    print(near, flush=True)
    if requeue_job():
        print("SLURM requeues the job, which resumes from this checkpoint", flush=True)
        time.sleep(SECONDS_TO_END)
        raise Preempted(f"{near}; SLURM accepted the requeue, but hasn't ended this job: see squeue")
    raise Preempted(f"{near}; it isn't requeued, so run again to resume")
