"""A clock on the steps of a transformers Trainer, and the memory of this process.

A step lasts from the end of the step before it, so that what a trainer does besides computing (reading rows, collating,
logging) is in it.
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any

# Printed by peers after their first step; our trainings log it themselves.
FIRST_STEP = "step 1/"


class Clock:
    """Records when each step ended and what it computed."""

    def __init__(self, warm_up: int, steps: int):
        self.warm_up, self.steps = warm_up, steps
        self.started = self.first_begin = time.perf_counter()
        self.ends: list[float] = []
        self.counts: list[dict[str, int]] = []

    def count(self, **counts: int) -> None:
        """Count a micro-batch of the current step."""
        if len(self.counts) == len(self.ends):
            self.counts.append(dict.fromkeys(counts, 0))
        self.counts[-1] = {name: self.counts[-1][name] + count for name, count in counts.items()}

    def callback(self):
        """Return the Trainer callback that stops the training after the last timed step."""
        from transformers import TrainerCallback

        clock = self

        class Ticks(TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                if not clock.ends:
                    clock.first_begin = time.perf_counter()

            def on_step_end(self, args, state, control, **_):
                clock.ends.append(time.perf_counter())
                if len(clock.ends) == 1:
                    print(f"{FIRST_STEP}{state.max_steps}", flush=True)
                control.should_training_stop |= len(clock.ends) == clock.warm_up + clock.steps

        return Ticks()

    def found(self) -> dict[str, Any]:
        """Return figures over the timed steps, and every step."""
        timed = self.counts[self.warm_up :]
        sums = {name: sum(step[name] for step in timed) for name in timed[0]}
        begin = self.ends[self.warm_up - 1] if self.warm_up else self.first_begin
        seconds = self.ends[-1] - begin
        return sums | {
            "steps": len(timed),
            "seconds": seconds,
            **{f"{name}_per_s": count / seconds for name, count in sums.items()},
            "first_step_after_s": self.ends[0] - self.started,
        }


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # getrusage would count what the process was before it became this program, a copy of its parent.
    found = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024
