"""Early ends of a training, after a checkpoint: preemption, on SIGTERM or shortly before the cluster's time limit ends its job;
and the end of a snapshot.

Resume is exact, so the job that continues produces the result of an uninterrupted one. When the time limit was the reason, the
launcher has SLURM requeue the job (`training.launch.worker_endings`): a training longer than any limit runs as a chain of jobs.
"""

import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

from snaketune.files import write_json

# Seconds reserved for a checkpoint before the time limit. SLURM may send its own signals up to this early.
MIN_SAVE_SECONDS = 60
# Upper bound of that reserve, as a share of the time left when training starts. Without it a one-minute job would end at once.
MAX_SAVE_SHARE = 0.25
# Estimate of a save until one has been timed: weights and optimizer states, to a slow shared disk. The measured time is written
# to SAVE_SECONDS_FILE, for the jobs that resume this one.
BYTES_PER_PARAMETER, BYTES_PER_SECOND = 12, 1e8
SAVE_SECONDS_FILE = "save_seconds.json"
# Interval at which a scheduler that didn't answer is queried again.
RETRY_SECONDS = 300
# All processes must stop after the same step. Agreeing on it waits for the device, so processes with steps shorter than
# SHORT_STEP seconds agree at every eighth step only.
SHORT_STEP, EVERY = 0.5, 8


class PreemptionCallback(TrainerCallback):
    """Ends a training early, with a checkpoint, on SIGTERM or before the job's time limit.

    Add it as the last callback: callbacks that end the training for good take precedence.
    """

    def __init__(self, trained_parameters: int, state: Path, job_end_time: Callable[[], float | None] = lambda: None):
        """
        Args:
            state: a folder for what a resumed training reads.
            job_end_time: queries the time (seconds since the epoch) at which the job ends; None if it is unknown.
        """
        self.main, self.terminated, self.job_end_time = PartialState().is_main_process, False, job_end_time
        self.save_seconds_file = state / SAVE_SECONDS_FILE
        self.end, self.queried_at = job_end_time() if self.main else None, time.monotonic()
        self.min_seconds = min(MIN_SAVE_SECONDS, MAX_SAVE_SHARE * max(0.0, self._seconds_left()))
        self.timed = self._previous_save_seconds()
        estimated = trained_parameters * BYTES_PER_PARAMETER / BYTES_PER_SECOND
        self.save_seconds = estimated if self.timed is None else self.timed
        self.step_seconds, self.agreed_seconds, self.since = 0.0, 1.0, time.monotonic()
        # "signal" or "deadline"; None while there is no reason to stop.
        self.reason: str | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        self.terminated = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.since = time.monotonic()

    def on_step_end(self, args, state, control, **_):
        """Save and stop, if any process has a reason to."""
        self.step_seconds = max(self.step_seconds, time.monotonic() - self.since)
        self.since = time.monotonic()
        if control.should_training_stop or state.global_step >= state.max_steps:
            return
        self.reason = self._agree(state.global_step, self._reason())
        if self.reason:
            control.should_save = control.should_training_stop = True

    def interrupts(self) -> bool:
        """Whether any process has a reason to stop; called by all of them while held-out rows are measured."""
        self.reason = self._agree(0, self._reason())
        return self.reason is not None

    def on_save(self, *_: Any, **__: Any) -> None:
        """Record how long the checkpoint took, from the end of its step."""
        self.save_seconds = self.timed = max(self.timed or 0.0, time.monotonic() - self.since)
        if self.main:
            write_json(self.save_seconds_file, round(self.timed, 3))

    def _previous_save_seconds(self) -> float | None:
        """Seconds that a checkpoint took in an earlier job; None if none was timed."""
        try:
            return max(0.0, float(json.loads(self.save_seconds_file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            return None

    def _reason(self) -> str | None:
        if self.terminated:
            return "signal"
        if self.end is None and self.main and time.monotonic() - self.queried_at > RETRY_SECONDS:
            self.end, self.queried_at = self.job_end_time(), time.monotonic()
        if self._deadline_is_near():
            # The time limit may have been raised.
            self.end = self.job_end_time()
            if self._deadline_is_near():
                return "deadline"
        return None

    def _seconds_left(self) -> float:
        return float("inf") if self.end is None else self.end - time.time()

    def _deadline_is_near(self) -> bool:
        steps = EVERY if self.agreed_seconds < SHORT_STEP else 1
        return self._seconds_left() < max(self.min_seconds, 3 * self.save_seconds + 2 * self.step_seconds * steps)

    def _agree(self, step: int, reason: str | None) -> str | None:
        """The reason of any process, the same in all of them."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return reason
        if self.agreed_seconds < SHORT_STEP and step % EVERY:
            return None
        numbers = [float(reason == "signal"), float(reason == "deadline"), self.step_seconds]
        shared = torch.tensor(numbers, device=PartialState().device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        signalled, near, self.agreed_seconds = shared.tolist()
        return "signal" if signalled else "deadline" if near else None


class EndOfSnapshot(TrainerCallback):
    """Ends a training after this share of its steps, rounded up, with a checkpoint from which the whole run resumes."""

    def __init__(self, until: float):
        self.until = until

    def on_train_begin(self, args, state, control, **_):
        """End at once if the checkpoint that is resumed from is that of the end."""
        control.should_training_stop |= self._ended(state)

    def on_step_end(self, args, state, control, **_):
        if self._ended(state):
            control.should_save = control.should_training_stop = True

    def _ended(self, state) -> bool:
        return state.global_step >= math.ceil(state.max_steps * self.until)
