"""A training that SIGTERM ends after any step, or while it measures, and that is resumed, has the log of an undisturbed one."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from snaketune.artifacts.manifest import describe_files
from snaketune.config.held_out import Average, Evaluate, StopTraining
from snaketune.engine.throughput import LogCallback
from snaketune.stages.outcome import Outcome
from snaketune.training.launch.worker_endings import Preempted

from .event_files import SPEED
from .pipeline_runs import held_out_pack, pack, spec, train
from .preference_runs import Trained

# No step of a signal has a log line (1, every third, measured ones) or a checkpoint, except where it says so.
INTERVALS = {"log_steps": 3, "every": 5, "evaluate": Evaluate(every=4, samples=0)}
# Name → settings of the training, and the steps after which it ends; `measuring 4` is in that step's measurement.
SIGNALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "once": ({}, ("after 2",)),
    "averaged": ({"average": Average(ema=0.9)}, ("after 7",)),
    "several times between two lines": ({}, ("after 1", "after 2", "after 7")),
    "with a line, with a checkpoint": ({}, ("after 3", "after 5")),
    "measuring": ({"keep": "best"}, ("measuring 4", "after 7", "measuring 8")),
    "stopped": ({"stop_if": StopTraining(held_out_rises=1), "learning_rate": 1.0}, ("after 2", "measuring 4")),
}
UNEQUAL = (*SPEED, "warming_up")


def sft(folder: Path, **settings: Any):
    rows, held_out = pack(folder / "pack"), held_out_pack(folder / "held", rows=5)
    made = spec(epochs=2, **settings)

    def trained(name: str) -> tuple[Outcome, Path]:
        outcome = train(folder / name, rows, made, held_out=held_out, **INTERVALS)
        return outcome, folder / name / "payload.partial"

    return trained


def dpo(folder: Path, **settings: Any):
    pairs = Trained(folder, "preference")

    def trained(name: str) -> tuple[Outcome, Path]:
        loss = {"loss": "sigmoid", "stop_if": {"kl_above": 1e6, "window": 3}}
        outcome, work = pairs.train(name, loss, micro_batch_rows=2, **INTERVALS, **settings)
        return outcome, work.payload

    return trained


@pytest.fixture(autouse=True)
def handler_of_pytest():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in outcome.run["history"]]


# DPO's lines differ in what they measure.
ALIKE = SIGNALS.keys() - {"measuring", "once"}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((sft, what) for what in SIGNALS),
        *(pytest.param(dpo, what, marks=pytest.mark.slow if what in ALIKE else []) for what in SIGNALS),
    ],
)
def test_the_log_is_that_of_an_undisturbed_training(kind, what, tmp_path, monkeypatch):
    settings, signals = SIGNALS[what]
    trained = kind(tmp_path, **settings)
    straight, payload = trained("straight")
    left = list(signals)

    def terminated_in(method: str, where: str) -> None:
        original = getattr(LogCallback, method)

        def called(self, args, state, control, **more):
            original(self, args, state, control, **more)
            if left[:1] == [f"{where} {state.global_step}"]:
                left.pop(0)
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(LogCallback, method, called)

    terminated_in("on_step_end", "after")
    terminated_in("on_prediction_step", "measuring")
    for _ in signals:
        with pytest.raises(Preempted):
            trained("preempted")
    preempted, again = trained("preempted")
    assert not left and ("stopped" in straight.about) == (what == "stopped")
    assert lines(preempted) == lines(straight)
    assert [line["step"] for line in lines(straight)] == [1, 3, 4, 6, 8, 9, 12][: len(lines(straight))]
    assert preempted.run["held_out"]["points"] == straight.run["held_out"]["points"]
    assert (preempted.counts, preempted.about) == (straight.counts, straight.about)
    assert describe_files(again) == describe_files(payload)
