"""Which measurement of held-out rows is the best, when a training stops by them, and the weights of the best one on disk.

state/best/checkpoint-40     the trained weights at the best measurement so far, complete like a checkpoint
state/best/checkpoint-20     those that were the best when the last checkpoint was written, from which a killed training
                             resumes
"""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

from snaketune.config.held_out import Metric, Selection
from snaketune.engine.checkpoints import COMPLETE

BEST = "best"
# Prefix of the metrics of a log line that measures held-out rows: transformers', by which trackers group them.
HELD_OUT = "eval_"
Point = dict[str, Any]


def points(history: list[dict[str, Any]]) -> list[Point]:
    """Return the measurements among the entries of a log, without the prefix of their keys.

    >>> points([{"loss": 2.0, "step": 5}, {"eval_loss": 2.5, "eval_margin": 0.1, "step": 5}])
    [{'loss': 2.5, 'margin': 0.1, 'step': 5}]
    """
    # Each has a loss.
    measured = (entry for entry in history if f"{HELD_OUT}loss" in entry)
    return [
        {name.removeprefix(HELD_OUT): value for name, value in entry.items() if name != "epoch"} for entry in measured
    ]


def best_point(measured: list[Point], metric: Metric) -> Point | None:
    """Return the first of the best measurements; None without any.

    >>> best_point([{"loss": 3.0, "step": 0}, {"loss": 2.0, "step": 5}, {"loss": 2.0, "step": 9}], "loss")
    {'loss': 2.0, 'step': 5}
    """
    sign = -1 if metric == "loss" else 1
    return max((one for one in measured if metric in one), key=lambda one: sign * one[metric], default=None)


def reason_to_stop(measured: list[Point], settings: Selection) -> str:
    """Return why `stop_if` ends the training after the last of these measurements; "" if it doesn't.

    >>> settings = Selection(stop_if={"held_out_rises": 2})
    >>> reason_to_stop([{"loss": loss, "step": step} for step, loss in enumerate((3.0, 2.0, 2.5, 2.1))], settings)
    'held-out loss 2.1 is worse than 2 at step 1, the best, for 2 measurements in a row'
    """
    best, metric = best_point(measured, settings.metric), settings.metric
    if settings.stop_if is None or best is None:
        return ""
    worse = sum(one["step"] > best["step"] for one in measured)
    if worse < settings.stop_if.held_out_rises:
        return ""
    return (
        f"held-out {metric} {measured[-1][metric]:.5g} is worse than {best[metric]:.5g} at step {best['step']}, the best, for "
        f"{worse} measurements in a row"
    )


def best_folder(state: Path, step: int) -> Path:
    """Return the folder of the best weights of a step. Args: state: of the work folder."""
    return state / BEST / f"checkpoint-{step}"


def has_its_best(checkpoint: Path, state: Path, settings: Selection) -> bool:
    """Whether the weights of the best measurement before a checkpoint are complete on disk, if they are kept."""
    history = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    best = best_point(points(history), settings.metric)
    return settings.keep == "last" or best is None or (best_folder(state, best["step"]) / COMPLETE).is_file()


def remove_other_best(state: Path, kept: int | None) -> None:
    """Remove the weights of measurements that are the best no more. Args: kept: the step of those that are."""
    for folder in (state / BEST).glob("checkpoint-*"):
        if folder.name != f"checkpoint-{kept}":
            shutil.rmtree(folder)


def best_step(state: TrainerState, settings: Selection) -> int | None:
    """Return the step of the best measurement so far; None without any."""
    best = best_point(points(state.log_history), settings.metric)
    return best and best["step"]
