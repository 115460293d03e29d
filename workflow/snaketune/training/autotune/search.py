"""Which plan are tried, in which order, and what was found of those that were."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from snaketune.artifacts.manifest import write_json
from snaketune.training.autotune.batch_plan import BatchPlan

# One line of the curve: a BatchPlan' fields, accumulation, fits, why; and where it fits tokens_per_second, micro_batch_s,
# optimizer_s, peak_bytes.
Trial = dict[str, Any]
# Takes BatchPlan and the trials so far with the same kind of activations.
Measure = Callable[[BatchPlan, list[Trial]], Trial]
# More rows that gain less than this gain nothing; two such one after the other end the search.
GAIN = 0.02


def search(possible: list[int], checkpointing: Literal["auto"] | bool, measure: Measure) -> Iterator[Trial]:
    """The trials, as they are made.

    Args:
        possible: rows at once, ascending.
        checkpointing: whether activations are recomputed; `auto` where memory keeps the speed down.
    """
    kept: list[Trial] = []
    if checkpointing is not True:
        for trial in _increase_rows(possible, partial(_try, measure, False)):
            kept.append(trial)
            yield trial
    if checkpointing is True or (checkpointing == "auto" and _is_memory_bound(kept)):
        yield from _increase_rows(possible, partial(_try, measure, True))


def _try(measure: Measure, checkpointing: bool, rows: int, before: list[Trial]) -> Trial:
    return measure(BatchPlan(micro_batch_rows=rows, gradient_checkpointing=checkpointing), before)


def _increase_rows(possible: list[int], measure: Callable[[int, list[Trial]], Trial]) -> Iterator[Trial]:
    """Twice as many rows each time; after a trial that didn't fit, what lies between it and the last one that did."""
    trials: list[Trial] = []
    rows, too_many, idle = possible[0], None, 0
    while rows is not None:
        trial = measure(rows, list(trials))
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
    """Whether more rows at once might be faster, if only they fitted."""
    fits = [one["tokens_per_second"] for one in trials if one["fits"]]
    if len(fits) == len(trials):
        return False
    return len(fits) < 2 or fits[-1] > (1 + GAIN) * max(fits[:-1])


class Trials:
    """What was measured, a file each: a process after a killed one, or after one that ran out, doesn't do it again."""

    def __init__(self, state: Path):
        self.folder = state / "trials"
        self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.json")))

    def get(self, plan: BatchPlan) -> Trial | None:
        """The trial of these plan, if it was made."""
        file = self._file(plan)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def add(self, plan: BatchPlan, trial: Trial) -> None:
        """Keep the trial of these plan."""
        write_json(self._file(plan), trial)

    def _file(self, plan: BatchPlan) -> Path:
        kind = "recomputed" if plan.gradient_checkpointing else "kept"
        return self.folder / f"{plan.micro_batch_rows}-{kind}.json"
