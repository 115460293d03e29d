"""Training curves: every point is written once to every tracker, however often the training was killed and resumed.

Resume is exact, so a point that is computed again equals the one already written. Each tracker reports the newest step of each
curve that it has stored. At the start it receives the later points of the checkpoint (the Trainer's log history), and then
every newer log line:

    written before the kill      1 2 3 4 5 6 7 . .
    checkpoint at step 4         1 2 3 4               → nothing to fill in; 5, 6, 7 are computed again and not written
    a tracker that lost 3 to 7   1 2                   → 3 and 4 are filled in; 5, 6, 7 are written when computed

A tracker is the class `Run` of its module `to_<name>`: one training, a new run or that of an earlier attempt. `newest` is the
newest step by curve, -1 for an unknown one; `write` takes ascending steps, each with its values by curve; `close` ends the
attempt and receives whether the training is finished, too.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback

from snaketune.config.tracking import IN_ADDRESS, Tracking
from snaketune.stages.cache.work_folders import WorkFolder

# The metrics of a log line that measure speed; all others are training metrics.
SPEED = ("tokens_per_second", "supervised_tokens_per_second", "mfu", "mfu_computed", "memory_gb")
NO_METRICS = ("step", "warming_up")
# Prefix of the metrics of a line that measures held-out rows.
HELD_OUT = "held_out_"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A training run as trackers see it.

    Attributes:
        out: the folder where its result is published; `results` is that of all results.
        fingerprint: of its result: the same in all attempts, and unique to this training.
        parameters: its spec, by dotted keys; the same on every machine.
    """

    settings: Tracking
    stage: str
    out: Path
    results: Path
    fingerprint: str
    parameters: dict[str, bool | int | float | str]

    @classmethod
    def of(cls, stage: str, spec: dict[str, Any], settings: Tracking, work: WorkFolder, out: Path) -> Self:
        """Args: spec: as plain JSON; work: its work folder, which is below the folder of all results."""
        place = {"out": out, "results": work.folder.parents[2], "fingerprint": work.folder.name}
        return cls(settings=settings, stage=stage, parameters=dict(_flat(spec)), **place)

    @property
    def name(self) -> str:
        """Stage and name, such as `sft/demo`."""
        return f"{self.stage}/{self.out.name}"


class Curves(TrainerCallback):
    """Passes log lines of the main process to the trackers. One that fails is reported and dropped; the training continues."""

    def __init__(self, tracked: TrackedRun):
        self.tracked = tracked
        self.trackers: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **_):
        """Open the trackers, and fill in the points that they lack."""
        if not state.is_world_process_zero:
            return
        for name in Tracking.model_fields:
            if name != "project" and getattr(self.tracked.settings, name) not in (None, False):
                self._try(name, self._open, name)
        self._write(state.log_history)

    def _open(self, name: str) -> None:
        # Imported only if configured: each of these libraries takes up to a second.
        self.trackers[name] = import_module(f"snaketune.tracking.to_{name}").Run(self.tracked)

    def on_log(self, args, state, control, **_):
        """Write the newest line."""
        self._write(state.log_history[-1:])

    def close(self, finished: bool) -> None:
        for name, tracker in list(self.trackers.items()):
            self._try(name, tracker.close, finished)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        points = [(line["step"], metrics(line)) for line in lines if "loss" in line or f"{HELD_OUT}loss" in line]
        for name, tracker in list(self.trackers.items()):
            new = [
                (step, {curve: value for curve, value in values.items() if step > tracker.newest[curve]})
                for step, values in points
            ]
            if lacking := [(step, values) for step, values in new if values]:
                self._try(name, tracker.write, lacking)
                for step, values in lacking:
                    tracker.newest |= dict.fromkeys(values, step)

    def _try(self, name: str, action: Callable[..., None], argument: Any) -> None:
        """Call `action`; if it fails, print the error and drop the tracker."""
        try:
            action(argument)
        # Some libraries call sys.exit on settings that they reject.
        except (Exception, SystemExit) as error:
            self.trackers.pop(name, None)
            message = IN_ADDRESS.sub("//", re.sub(r"\s+", " ", str(error)))[:300]
            print(
                f"tracking.{name} failed and is not used any more; the training continues without it "
                f"({type(error).__name__}: {message})",
                flush=True,
            )


@contextmanager
def track_curves(trainer: Any, tracked: TrackedRun | None) -> Iterator[None]:
    """Send the curves of `trainer` to the trackers while the context is open; no-op if `tracked` is None."""
    if tracked is None:
        yield
        return
    curves, finished = Curves(tracked), False
    trainer.add_callback(curves)
    try:
        yield
        finished = True
    finally:
        curves.close(finished)


def metrics(line: dict[str, Any]) -> dict[str, float]:
    """The points of a log line, by curve.

    >>> metrics({"loss": 3.2, "step": 20, "mfu": 0.52, "warming_up": True})
    {'train/loss': 3.2, 'speed/mfu': 0.52}
    >>> metrics({"held_out_loss": 3.4, "epoch": 1.0, "step": 20})
    {'held_out/loss': 3.4}
    """
    measured = f"{HELD_OUT}loss" in line
    return {
        f"{'held_out' if measured else 'speed' if name in SPEED else 'train'}/{name.removeprefix(HELD_OUT)}": float(
            value
        )
        for name, value in line.items()
        if name not in NO_METRICS and isinstance(value, int | float) and (name != "epoch" or not measured)
    }


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Flatten a spec to dotted keys; local paths are reduced to their last component.

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
