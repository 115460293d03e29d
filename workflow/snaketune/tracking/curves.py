"""The curves of a training, each point once in every tracker, however often the training was killed and resumed.

A kill comes at any moment: the checkpoint that a training resumes from may be older than the newest points, which are then
computed again, or newer than what a tracker had still in memory. So a tracker is asked for the newest point of each curve that
it really holds. At the start it gets those later ones that the checkpoint knows of (the Trainer's log is part of it), and then
every line of the log that is newer. A resume is exact, so a point that isn't written again is the one that was written.

    written before the kill      1 2 3 4 5 6 7 . .
    checkpoint at step 4         1 2 3 4               → nothing to fill in; 5, 6, 7 come again, and aren't written
    a tracker that lost 3 to 7   1 2                   → 3 and 4 are filled in; 5, 6, 7 are written as they come

Only the first process tracks. A tracker that fails is told once and left out; no training ends for it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from snaketune.config.tracking import IN_ADDRESS, Tracking
from snaketune.stages.cache.work_folders import WorkFolder

# Of the metrics that a line of the log holds, those that say how fast it goes; all others say how it learns.
SPEED = ("tokens_per_second", "supervised_tokens_per_second", "mfu", "mfu_computed", "memory_gb")
NO_METRICS = ("step", "warming_up")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A training as trackers know it.

    Attributes:
        settings: where its curves go.
        name: `sft/demo`.
        fingerprint: of its result; the same in all its attempts, and in no other training.
        out: where its result is published.
        results: the folder of all results.
        parameters: its spec, by dotted keys; the same on every machine.
    """

    settings: Tracking
    name: str
    fingerprint: str
    out: Path
    results: Path
    parameters: dict[str, bool | int | float | str]

    @classmethod
    def of(cls, stage: str, spec: dict[str, Any], settings: Tracking, work: WorkFolder, out: Path) -> "TrackedRun":
        """Args: spec: as plain JSON; work: where it works, below the folder of all results."""
        return cls(
            settings=settings,
            name=f"{stage}/{out.name}",
            fingerprint=work.folder.name,
            out=out,
            results=work.folder.parents[2],
            parameters=dict(_flat(spec)),
        )


class Tracker(Protocol):
    """One training in one tracker: a new run, or the one that an earlier attempt began. Whatever it raises, it is left out."""

    newest: dict[str, int]
    """The newest step of each curve that the tracker holds; 0 of one that it hasn't."""

    def __init__(self, tracked: TrackedRun): ...

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        """Points that the tracker doesn't hold: steps, rising, with their values by curve."""

    def close(self, finished: bool) -> None:
        """The attempt is over; args: finished: and the training with it."""


class Curves(TrainerCallback):
    """Hands the lines of the log to the trackers."""

    def __init__(self, tracked: TrackedRun):
        self.tracked = tracked
        self.trackers: dict[str, Tracker] = {}

    def on_train_begin(self, args, state, control, **_):
        """Opens the trackers, and fills in what they lack."""
        if not state.is_world_process_zero:
            return
        for name in Tracking.model_fields:
            if name != "project" and getattr(self.tracked.settings, name) not in (None, False):
                self._try(name, lambda name=name: self.trackers.update({name: _open(name, self.tracked)}))
        self._write(state.log_history)

    def on_log(self, args, state, control, **_):
        """The newest line."""
        self._write(state.log_history[-1:])

    def close(self, finished: bool) -> None:
        for name, tracker in list(self.trackers.items()):
            self._try(name, lambda tracker=tracker: tracker.close(finished))

    def _write(self, lines: list[dict[str, Any]]) -> None:
        points = [(line["step"], metrics(line)) for line in lines if "loss" in line]
        for name, tracker in list(self.trackers.items()):
            lacking = [
                (step, {curve: value for curve, value in values.items() if step > tracker.newest[curve]})
                for step, values in points
            ]
            lacking = [(step, values) for step, values in lacking if values]
            if lacking:
                self._try(name, lambda tracker=tracker, lacking=lacking: tracker.write(lacking))
                for step, values in lacking:
                    tracker.newest |= dict.fromkeys(values, step)

    def _try(self, name: str, do: Callable[[], None]) -> None:
        """SystemExit too: some libraries end a process whose settings they don't like."""
        try:
            do()
        except (Exception, SystemExit) as error:
            self.trackers.pop(name, None)
            told = IN_ADDRESS.sub("//", re.sub(r"\s+", " ", str(error)))[:300]
            print(
                f"tracking.{name} failed and is left out from here on; the training goes on without it "
                f"({type(error).__name__}: {told})",
                flush=True,
            )


@contextmanager
def track_curves(trainer: Any, tracked: TrackedRun | None) -> Iterator[None]:
    """Draw the curves of what `trainer` trains meanwhile."""
    if tracked is None:
        yield
        return
    curves = Curves(tracked)
    trainer.add_callback(curves)
    finished = False
    try:
        yield
        finished = True
    finally:
        curves.close(finished)


def _open(name: str, tracked: TrackedRun) -> Tracker:
    """Imported only where it is asked for: each of these libraries costs up to a second."""
    return import_module(f"snaketune.tracking.to_{name}").Run(tracked)


def metrics(line: dict[str, Any]) -> dict[str, float]:
    """The points of a line of the log, by curve.

    >>> metrics({"loss": 3.2, "step": 20, "mfu": 0.52, "warming_up": True})
    {'train/loss': 3.2, 'speed/mfu': 0.52}
    """
    return {
        f"{'speed' if name in SPEED else 'train'}/{name}": float(value)
        for name, value in line.items()
        if name not in NO_METRICS and isinstance(value, int | float)
    }


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """A spec as trackers compare them; of a folder of this machine, only the last name.

    >>> dict(_flat({"base": {"path": "/models/tiny"}, "training": {"betas": [0.9, 0.95], "seed": 0}, "lora": None}))
    {'base.path': 'tiny', 'training.betas': '[0.9, 0.95]', 'training.seed': 0, 'lora': 'none'}
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, str) and value.startswith(("/", ".", "~")):
        yield key, Path(value).name
    else:
        yield key, value if isinstance(value, bool | int | float | str) else "none" if value is None else str(value)
