"""Search for the fastest batch plan: which plans are tried, in which order, and for how long; trials that survive their
process. Importing this doesn't import torch.

    state/trials.json   the trials so far, and the one that runs, as one that doesn't fit: a process that the kernel kills for
                        memory, or that ends with another one, can't store it
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from snaketune.training.autotune.batch_plan import BatchPlan, halved

TRIALS = "trials.json"
# One point of the curve: the fields of a BatchPlan, accumulation, fits, why; and if it fits, tokens_per_second, micro_batch_s,
# step_s (seconds of an optimizer step), trial_s (of the whole trial), peak_bytes.
Trial = dict[str, Any]
# Trials whose throughput differs by a smaller share count as equal.
SPEED_TOLERANCE = 0.02
# Throughput must grow by this share to count as a gain; two trials in a row without a gain end the search.
GAIN = 0.02
# Of the longest training that waits for the measurement.
SHARE = 0.03
# Optimizer steps that a trial measures at least, after one that isn't counted.
MIN_STEPS = 2
# In the steps of a trial, two each.
MICRO_BATCHES = 2 * (MIN_STEPS + 1)


def halvings(share: int) -> list[int]:
    """The rows per micro-batch that are tried, ascending: a process' share of a step, and its halves that divide it.

    >>> halvings(24), halvings(7)
    ([1, 3, 6, 12, 24], [1, 7])
    """
    rows = [share]
    while half := halved(rows[-1], share):
        rows.append(half)
    return rows[::-1]


def search(
    ascending_rows: list[int],
    checkpointing: Literal["auto"] | bool,
    measure: Callable[[BatchPlan], Trial],
    is_worthwhile: Callable[[list[Trial]], bool] = lambda trials: True,
) -> list[Trial]:
    """Try these rows per micro-batch until memory runs out or throughput stops growing; if memory was the limit and
    `checkpointing` is `auto`, once more with gradient checkpointing. Args: is_worthwhile: asked before each trial."""
    trials: list[Trial] = []
    for recomputes in (False, True) if checkpointing == "auto" else (checkpointing,):
        fastest, idle = 0.0, 0
        for rows in ascending_rows:
            if not is_worthwhile(trials):
                return trials
            trials.append(measure(BatchPlan(micro_batch_rows=rows, gradient_checkpointing=recomputes)))
            if not trials[-1]["fits"]:
                break
            speed = trials[-1]["tokens_per_second"]
            idle = 0 if speed > (1 + GAIN) * fastest else idle + 1
            fastest = max(fastest, speed)
            if idle == 2:
                break
        if trials[-1]["fits"] or idle:
            break
    return trials


def best_of(trials: list[Trial]) -> Trial:
    """The trial with the lowest peak memory among the fastest ones, those within SPEED_TOLERANCE of the maximum."""
    fastest = max(trial["tokens_per_second"] for trial in trials)
    fast = [trial for trial in trials if trial["tokens_per_second"] >= (1 - SPEED_TOLERANCE) * fastest]
    return min(fast, key=lambda trial: (trial["peak_bytes"], trial["micro_batch_rows"]))


def is_too_short(rows: float) -> bool:
    """Whether trying one row per micro-batch takes more than its share of a training on so many rows in a process."""
    return SHARE * rows < MICRO_BATCHES


def read_trials(state: Path) -> list[Trial]:
    file = state / TRIALS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
