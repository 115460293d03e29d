"""A training that has to leave before it is done: told to by SIGTERM, or because the cluster ends its job soon.

It finishes its step, writes a checkpoint, and ends. What it leaves is exact, so the job that goes on with it makes what an
undisturbed one would have made. Of a job that the time limit ends, the process that launched the training asks SLURM for
another one in its place (`training.launch.requeue`); a training longer than any limit is a chain of jobs.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

from snaketune.artifacts.manifest import write_json
from snaketune.cluster.deadline import job_end_time, seconds_until

# The least that a checkpoint is given before the end; SLURM sends its own signals this long before at the earliest.
LEAST_SECONDS = 60
# But no larger share of the time that the job had when it began to train, or one of a minute would only ever leave.
LARGEST_SHARE = 0.25
# Of weights and an optimizer's states, to a slow shared disk, until a checkpoint has been timed; beside the checkpoints
# stands how long that took, for those who go on in a next job.
BYTES_PER_PARAMETER, BYTES_PER_SECOND = 12, 1e8
TOOK = "save_seconds.json"
# A scheduler that didn't answer is asked again.
ASKED_AGAIN_SECONDS = 300
# Several processes have to leave after the same step. Of short steps they agree at every eighth: that waits for the device.
SHORT_STEP, EVERY = 0.5, 8


class Leave(TrainerCallback):
    """Ends a training with a checkpoint when it has to leave. The last of the callbacks: who ends it for good comes first."""

    def __init__(self, trained_parameters: int, state: Path):
        """Args: state: of the work folder."""
        self.told, self.took = False, state / TOOK
        self.main = PartialState().is_main_process
        self.end, self.asked = job_end_time() if self.main else None, time.monotonic()
        self.least = min(LEAST_SECONDS, LARGEST_SHARE * max(0.0, seconds_until(self.end)))
        self.timed = self._known()
        estimated = trained_parameters * BYTES_PER_PARAMETER / BYTES_PER_SECOND
        self.save_seconds = estimated if self.timed is None else self.timed
        self.step_seconds = 0.0
        self.agreed_seconds = 1.0
        self.since = time.monotonic()
        self.why: str | None = None
        signal.signal(signal.SIGTERM, self._told)

    def _told(self, *_: Any) -> None:
        self.told = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Of the Trainer: a step begins."""
        self.since = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        """Of the Trainer: a step is done."""
        self.step_seconds = max(self.step_seconds, time.monotonic() - self.since)
        self.since = time.monotonic()
        if control.should_training_stop or state.global_step >= state.max_steps:
            return
        self.why = self._agreed(state.global_step, self._reason())
        if self.why:
            control.should_save = control.should_log = control.should_training_stop = True

    def on_save(self, *_: Any, **__: Any) -> None:
        """Of the Trainer: a checkpoint is written, and it began when the step was done."""
        self.timed = max(self.timed or 0.0, time.monotonic() - self.since)
        self.save_seconds = self.timed
        if self.main:
            write_json(self.took, round(self.timed, 3))

    def _known(self) -> float | None:
        """Seconds that a checkpoint took in a job before this one; None where none was timed."""
        try:
            return max(0.0, float(json.loads(self.took.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            return None

    def _reason(self) -> str | None:
        if self.told:
            return "signal"
        if self.end is None and self.main and time.monotonic() - self.asked > ASKED_AGAIN_SECONDS:
            self.end, self.asked = job_end_time(), time.monotonic()
        if self._is_near():
            # Somebody may have given the job more time.
            self.end = job_end_time()
            if self._is_near():
                return "deadline"
        return None

    def _is_near(self) -> bool:
        needed = max(self.least, 3 * self.save_seconds + 2 * self.step_seconds * (EVERY if self._short else 1))
        return seconds_until(self.end) < needed

    @property
    def _short(self) -> bool:
        return self.agreed_seconds < SHORT_STEP

    def _agreed(self, step: int, reason: str | None) -> str | None:
        """Of all processes: whether any of them has to leave."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return reason
        if self._short and step % EVERY:
            return None
        numbers = [float(reason == "signal"), float(reason == "deadline"), self.step_seconds]
        shared = torch.tensor(numbers, device=PartialState().device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        signalled, near, self.agreed_seconds = shared.tolist()
        return "signal" if signalled else "deadline" if near else None
