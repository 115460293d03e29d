"""The time that a calibration may take: a small share of the longest training that waits for it. Importing this doesn't import
torch: the launcher decides about short trainings on a CPU, without starting a process."""

import math
import time

import psutil

from snaketune.training.autotune.search import Trial

SHARE = 0.03
# A single process measures for SECONDS, at least MIN_STEPS steps. Several processes measure MIN_STEPS steps each: their clocks
# differ, but all must do equally many.
SECONDS, MIN_STEPS, MAX_STEPS = 2.0, 2, 20
# Of a trial: two in each step, of which the first step isn't counted.
MICRO_BATCHES = 2 * (MIN_STEPS + 1)


def is_too_short(rows: float) -> bool:
    """Whether measuring one row per micro-batch takes more than its share of a training on so many rows in a process."""
    return SHARE * rows < MICRO_BATCHES


class TimeLimit:
    """Decides before each trial whether its time is worth it. Without `epochs` there is no limit: the user wants the curve."""

    def __init__(self, *, epochs: float, rows: int, batch_rows: int, processes: int):
        """Set up for a training of `epochs` over `rows` rows."""
        self.epochs, self.rows = epochs, rows * epochs / processes
        self.steps = math.ceil(rows * epochs / batch_rows)

    def allows_first(self, shortest_s: float | None) -> bool:
        """Whether to measure one row per micro-batch. Args: shortest_s: seconds of the training at best; None if unknown."""
        if not self.epochs:
            return True
        if is_too_short(self.rows):
            return False
        return shortest_s is None or _elapsed() + SECONDS <= SHARE * _longest(shortest_s)

    def allows_another(self, trials: list[Trial]) -> bool:
        """Whether to measure twice the rows of the last trial, after these."""
        fitting = [one for one in trials if one["fits"]]
        if not self.epochs or not fitting:
            return True
        training_s = self.steps * min(
            one["accumulation"] * one["micro_batch_s"] + one["optimizer_s"] for one in fitting
        )
        last = fitting[-1]
        steps_s = MICRO_BATCHES / 2 * (2 * 2 * last["micro_batch_s"] + last["optimizer_s"])
        return _elapsed() + max(SECONDS, steps_s) <= SHARE * training_s


def _elapsed() -> float:
    """Return the seconds since this process started; of several, the longest."""
    return _longest(time.time() - psutil.Process().create_time())


def _longest(seconds: float) -> float:
    """Return the maximum over all processes, which must decide alike."""
    from accelerate.utils import gather_object

    return max(gather_object([seconds]))
