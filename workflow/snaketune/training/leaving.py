"""A training that has to leave before it is done: told to by SIGTERM, or because the cluster ends its job soon.

It finishes its step, writes a checkpoint, and ends. What it leaves is exact, so the job that goes on with it makes what an
undisturbed one would have made. Of a job that the time limit ends, the process that launched the training asks SLURM for
another one in its place (`training.left`); a training longer than any limit is a chain of jobs.
"""

import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

from snaketune.cluster.deadline import ends_at, seconds_left

# The least that a checkpoint is given before the end; SLURM sends its own signals this long before at the earliest.
LEAST_SECONDS = 60
# But no larger share of the time that the job had when it began to train, or one of a minute would only ever leave.
LARGEST_SHARE = 0.25
# Of weights and an optimizer's states, to a slow shared disk, until a checkpoint has been timed.
BYTES_PER_PARAMETER, BYTES_PER_SECOND = 12, 1e8
# Several processes have to leave after the same step. Of short steps they agree at every eighth: that waits for the device.
SHORT_STEP, EVERY = 0.5, 8


class Leave(TrainerCallback):
    """Ends a training with a checkpoint when it has to leave. The last of the callbacks: who ends it for good comes first."""

    def __init__(self, trained_parameters: int):
        self.told = False
        self.end = ends_at() if PartialState().is_main_process else None
        self.least = min(LEAST_SECONDS, LARGEST_SHARE * max(0.0, seconds_left(self.end)))
        self.save_seconds = trained_parameters * BYTES_PER_PARAMETER / BYTES_PER_SECOND
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
        self.save_seconds = max(self.save_seconds, time.monotonic() - self.since)

    def _reason(self) -> str | None:
        if self.told:
            return "signal"
        if self._is_near():
            # Somebody may have given the job more time.
            self.end = ends_at()
            if self._is_near():
                return "deadline"
        return None

    def _is_near(self) -> bool:
        needed = max(self.least, 3 * self.save_seconds + 2 * self.step_seconds * (EVERY if self._short else 1))
        return seconds_left(self.end) < needed

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
