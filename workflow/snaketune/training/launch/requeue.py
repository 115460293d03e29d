"""Report a preempted training, and requeue its job if the time limit was the reason.

state/preempted.json    the step and the reason; written by the main worker process, read by the launcher
"""

import json
import time
from pathlib import Path

from snaketune.artifacts.manifest import write_json
from snaketune.cluster.deadline import requeue_job
from snaketune.errors import SnaketuneError

FILE = "preempted.json"
# Wait for SLURM to end the job that it requeues.
SECONDS_TO_END = 120


class Preempted(SnaketuneError):
    """The training ended early, and its checkpoint is complete."""


def record_preemption(state: Path, step: int, reason: str, is_main: bool) -> Preempted:
    """Return the error that ends a preempted worker process, after recording step and reason.

    Args:
        reason: "signal" or "deadline".
        is_main: whether this is the main process, which writes the record.
    """
    if is_main:
        write_json(state / FILE, {"step": step, "reason": reason})
    return Preempted(f"stopped after step {step}, with a checkpoint")


def clear_preemption(state: Path) -> None:
    """Remove the record of an earlier attempt."""
    (state / FILE).unlink(missing_ok=True)


def raise_if_preempted(state: Path) -> None:
    """Handle a recorded preemption; called by the launcher once its workers have ended.

    Raises:
        Preempted: the workers recorded a preemption. If the time limit was the reason and SLURM requeues the job, SLURM usually
            ends this process before the error is raised.
    """
    try:
        record = json.loads((state / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    stopped = f"stopped after step {record['step']}, with a checkpoint, since"
    if record["reason"] == "signal":
        raise Preempted(f"{stopped} it received SIGTERM; run again to resume")
    print(f"{stopped} the job's time limit is near", flush=True)
    if requeue_job():
        print("SLURM requeues the job, which resumes from this checkpoint", flush=True)
        time.sleep(SECONDS_TO_END)
        raise Preempted(
            f"{stopped} the job's time limit is near; SLURM accepted the requeue, but hasn't ended this job: see squeue"
        )
    raise Preempted(f"{stopped} the job's time limit is near; it isn't requeued, so run again to resume")
