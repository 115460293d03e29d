"""What becomes of a training that has left before it was done: it is told, and where time was up, the job is queued again.

state/left.json    after which step, and why; a process that leaves writes it, the one that launched it reads it
"""

import json
import time
from pathlib import Path

from snaketune.artifacts.manifest import write_json
from snaketune.cluster.deadline import requeued
from snaketune.errors import SnaketuneError

FILE = "left.json"
# SLURM takes a moment to end a job that it puts back into the queue.
SECONDS_TO_END = 120


class Preempted(SnaketuneError):
    """A training has left, and a checkpoint holds all of it."""


def record_preemption(state: Path, step: int, why: str, first: bool) -> Preempted:
    """The error by which a process ends that leaves. Args: first: whether it is the one that writes."""
    if first:
        write_json(state / FILE, {"step": step, "why": why})
    return Preempted(f"stopped after step {step}, with a checkpoint")


def clear_preemption(state: Path) -> None:
    """Before an attempt."""
    (state / FILE).unlink(missing_ok=True)


def raise_if_preempted(state: Path) -> None:
    """Called when its processes have ended.

    Raises:
        Preempted: they had to leave. Where the time limit was the reason and SLURM queues the job again, that ends it first.
    """
    try:
        told = json.loads((state / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    stopped = f"stopped after step {told['step']}, with a checkpoint, since"
    if told["why"] == "signal":
        raise Preempted(f"{stopped} it was told to end (SIGTERM); run again to go on")
    print(f"{stopped} the job's time is up", flush=True)
    if requeued():
        print("the job goes back into the queue, and goes on from there", flush=True)
        time.sleep(SECONDS_TO_END)
    raise Preempted(f"{stopped} the job's time is up; it isn't queued again, so run again to go on")
