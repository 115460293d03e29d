"""A preempted training ends with a checkpoint, and the jobs that resume it produce the files of an uninterrupted one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import describe_files
from snaketune.engine import preemption
from snaketune.engine.dpo import DpoTrainer
from snaketune.training import pipeline
from snaketune.training.launch import worker_endings

from .preference_runs import Trained

# No checkpoints except those of preemption.
SETTINGS = {"every": 100, "micro_batch_rows": 2}


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ending(monkeypatch):
    """Jobs with five seconds left, all of them reserved for the checkpoint."""
    monkeypatch.setattr(pipeline, "job_end_time", lambda: time.time() + 5)
    monkeypatch.setattr(preemption, "MAX_SAVE_SHARE", 2.0)


def test_sigterm_ends_a_training_with_a_checkpoint_that_resumes_exactly(tmp_path, monkeypatch):
    trained = Trained(tmp_path, "preference")
    straight, work = trained.train("straight", {"loss": "sigmoid"}, **SETTINGS)
    with monkeypatch.context() as patch:
        original, calls = DpoTrainer.batch_loss, []

        def terminated(*arguments, **keywords):
            calls.append(1)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments, **keywords)

        patch.setattr(DpoTrainer, "batch_loss", terminated)
        with pytest.raises(worker_endings.Preempted, match="stopped after step"):
            trained.train("resumed", {"loss": "sigmoid"}, **SETTINGS)
    resumed, again = trained.train("resumed", {"loss": "sigmoid"}, **SETTINGS)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert (resumed.counts, resumed.about) == (straight.counts, straight.about)
    # It resumed instead of starting again.
    assert resumed.run["steps_of_this_process"] < straight.run["steps_of_this_process"]


def test_jobs_that_are_too_short_form_a_chain(tmp_path, ending):
    trained = Trained(tmp_path, "preference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "job_end_time", lambda: None)
        straight, work = trained.train("straight", {"loss": "sigmoid"}, **SETTINGS)
    steps = straight.counts["steps"]
    for done in range(1, steps):
        with pytest.raises(worker_endings.Preempted, match=f"stopped after step {done}, with a checkpoint"):
            trained.train("chained", {"loss": "sigmoid"}, **SETTINGS)
    chained, again = trained.train("chained", {"loss": "sigmoid"}, **SETTINGS)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert chained.run["steps_of_this_process"] == 1


@pytest.mark.parametrize(("seconds", "reserved"), [(None, 60), (3600, 60), (40, 10), (-5, 0)])
def test_a_short_job_reserves_only_a_share_of_its_time(monkeypatch, tmp_path, seconds, reserved):
    """If a one-minute job reserved 60 s for its checkpoint, it would stop after every step."""
    ends = lambda: seconds and time.time() + seconds  # noqa: E731
    assert preemption.PreemptionCallback(1000, tmp_path, ends).min_seconds == pytest.approx(reserved, abs=0.1)


def test_a_training_that_stop_if_ends_is_finished_and_writes_no_checkpoint(tmp_path, ending):
    trained = Trained(tmp_path, "preference")
    settings = {"loss": "sigmoid", "stop_if": {"margin_below": 1e9, "window": 1}}
    outcome, work = trained.train("stopped", settings, **SETTINGS)
    assert outcome.about["stopped"]["step"] == 1
    assert not list((work.state / "checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize("requeues", [True, False])
def test_only_a_job_near_its_time_limit_is_requeued(tmp_path, monkeypatch, requeues):
    calls = []
    monkeypatch.setattr(worker_endings, "requeue_job", lambda: calls.append(1) or requeues)
    monkeypatch.setattr(worker_endings, "SECONDS_TO_END", 0)
    worker_endings.raise_if_preempted(tmp_path)
    worker_endings.record_preemption(tmp_path, 7, "signal", is_main=True)
    with pytest.raises(worker_endings.Preempted, match=r"it was interrupted .*; run again"):
        worker_endings.raise_if_preempted(tmp_path)
    assert not calls
    worker_endings.record_preemption(tmp_path, 7, "deadline", is_main=False)
    assert json.loads(Path(tmp_path / worker_endings.PREEMPTED).read_text(encoding="utf-8"))["reason"] == "signal"
    worker_endings.record_preemption(tmp_path, 7, "deadline", is_main=True)
    with pytest.raises(worker_endings.Preempted, match="stopped after step 7"):
        worker_endings.raise_if_preempted(tmp_path)
    assert calls
    worker_endings.clear_endings(tmp_path)
    worker_endings.raise_if_preempted(tmp_path)


def test_the_next_job_knows_how_long_a_checkpoint_took(tmp_path, monkeypatch):
    """For 7B parameters, the estimate for a slow disk exceeds a short job, which would stop after every step."""
    first = preemption.PreemptionCallback(7_000_000_000, tmp_path, lambda: time.time() + 1800)
    assert first._reason() == "deadline"
    first.on_step_begin()
    first.on_save()
    assert first._reason() is None
    again = preemption.PreemptionCallback(7_000_000_000, tmp_path)
    assert again.save_seconds < 60 and again._reason() is None
    (tmp_path / preemption.SAVE_SECONDS_FILE).write_text("{", encoding="utf-8")
    assert preemption.PreemptionCallback(7_000_000_000, tmp_path).save_seconds == pytest.approx(840)


def test_a_scheduler_that_did_not_answer_is_queried_again(tmp_path, monkeypatch):
    answers = [None, None, time.time() + 10, time.time() + 10]
    callback = preemption.PreemptionCallback(1000, tmp_path, lambda: answers.pop(0))
    assert callback._reason() is None and len(answers) == 3
    monkeypatch.setattr(preemption, "RETRY_SECONDS", -1)
    assert callback._reason() is None
    callback.min_seconds = 60
    assert callback._reason() == "deadline" and not answers
