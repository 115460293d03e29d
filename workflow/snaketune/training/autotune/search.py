"""Search over batch plans: which ones are tried, in which order; and the stored results of trials."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from snaketune.artifacts.manifest import write_json
from snaketune.training.autotune.batch_plan import BatchPlan

# One point of the curve: the fields of a BatchPlan, accumulation, fits, why; and if it fits, tokens_per_second, micro_batch_s,
# optimizer_s, peak_bytes, reserved_bytes.
Trial = dict[str, Any]
# Runs a trial, given the trials so far with the same `gradient_checkpointing`.
Measure = Callable[[BatchPlan, list[Trial]], Trial]
# Throughput must grow by this share to count as a gain; two trials in a row without a gain end the search.
GAIN = 0.02


def search(possible: list[int], checkpointing: Literal["auto"] | bool, measure: Measure) -> Iterator[Trial]:
    """Run trials and yield each one, for these rows per micro-batch, ascending; `auto` tries both without and with
    checkpointing if memory limits the throughput."""
    trials: list[Trial] = []
    if checkpointing is not True:
        yield from _increase_rows(possible, False, measure, trials)
    if checkpointing is True or (checkpointing == "auto" and _is_memory_bound(trials)):
        yield from _increase_rows(possible, True, measure, [])


def _increase_rows(possible: list[int], recomputes: bool, measure: Measure, trials: list[Trial]) -> Iterator[Trial]:
    """Double the rows per trial, added to `trials`; after one that didn't fit, search between it and the last one that did."""
    rows, too_many, idle = possible[0], None, 0
    while rows is not None:
        plan = BatchPlan(micro_batch_rows=rows, gradient_checkpointing=recomputes)
        trial = measure(plan, list(trials))
        trials.append(trial)
        yield trial
        fits = [one for one in trials if one["fits"]]
        if not trial["fits"]:
            too_many = rows
        elif len(fits) > 1:
            before = max(one["tokens_per_second"] for one in fits[:-1])
            idle = 0 if trial["tokens_per_second"] > (1 + GAIN) * before else idle + 1
        if not fits or idle == 2:
            return
        last = fits[-1]["micro_batch_rows"]
        larger = [one for one in possible if last < one and (too_many is None or one < too_many)]
        wanted = last + 1 if too_many else 2 * last
        rows = next((one for one in larger if one >= wanted), larger[-1] if larger else None)


def _is_memory_bound(trials: list[Trial]) -> bool:
    """Whether larger micro-batches might be faster if they fitted in memory."""
    speeds = [one["tokens_per_second"] for one in trials if one["fits"]]
    return len(speeds) < len(trials) and (len(speeds) < 2 or speeds[-1] > (1 + GAIN) * max(speeds[:-1]))


class Trials:
    """Stored trials by plan, one file each, so that a restarted calibration doesn't repeat them; and the one that runs, which
    can't be stored by a process that is killed."""

    def __init__(self, state: Path):
        self.folder = state / "trials"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.running = self.folder / "running"

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.json")))

    def get(self, plan: BatchPlan) -> Trial | None:
        file = self._file(plan)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def add(self, plan: BatchPlan, trial: Trial) -> None:
        write_json(self._file(plan), trial)
        self.running.unlink(missing_ok=True)

    def begin(self, trial: Trial) -> None:
        """Store the trial that runs from now on, as it is without a measurement."""
        write_json(self.running, trial)

    def add_killed(self) -> None:
        """Add the trial that ran when the kernel killed it for memory, if one did."""
        if self.running.is_file():
            trial = json.loads(self.running.read_text(encoding="utf-8"))
            self.add(BatchPlan.of(trial), trial | {"why": "killed for memory"})

    def _file(self, plan: BatchPlan) -> Path:
        kind = "recomputed" if plan.gradient_checkpointing else "not-recomputed"
        return self.folder / f"{plan.micro_batch_rows}-{kind}.json"
