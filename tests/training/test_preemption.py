"""A training that has to leave ends with a checkpoint; those that go on with it end with the files of an undisturbed one."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import describe_files
from snaketune.training.launch import requeue
from snaketune.training.loop import preemption
from snaketune.training.preference.dpo_trainer import DpoTrainer

from .preference_runs import Trained

# No checkpoint but those of who leaves.
SETTINGS = {"every": 100, "micro_batch_rows": 2}


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def ending(monkeypatch):
    """Jobs that end five seconds after they begin, all of which a checkpoint is given, and a queue without a place for them."""
    monkeypatch.setattr(preemption, "ends_at", lambda: time.time() + 5)
    monkeypatch.setattr(preemption, "MAX_SAVE_SHARE", 2.0)


def test_told_to_end_it_leaves_with_a_checkpoint_and_goes_on_exactly(tmp_path, monkeypatch):
    trained = Trained(tmp_path, "preference")
    straight, work = trained.train("straight", {"loss": "sigmoid"}, **SETTINGS)
    with monkeypatch.context() as patch:
        original, calls = DpoTrainer.batch_loss, []

        def told(*arguments, **keywords):
            calls.append(1)
            if len(calls) == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments, **keywords)

        patch.setattr(DpoTrainer, "batch_loss", told)
        with pytest.raises(requeue.Preempted, match="stopped after step"):
            trained.train("resumed", {"loss": "sigmoid"}, **SETTINGS)
    resumed, again = trained.train("resumed", {"loss": "sigmoid"}, **SETTINGS)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert (resumed.counts, resumed.about) == (straight.counts, straight.about)
    # It went on, and didn't begin again.
    assert resumed.run["steps_of_this_process"] < straight.run["steps_of_this_process"]


def test_jobs_that_are_too_short_are_a_chain(tmp_path, ending):
    trained = Trained(tmp_path, "preference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "ends_at", lambda: None)
        straight, work = trained.train("straight", {"loss": "sigmoid"}, **SETTINGS)
    steps = straight.counts["steps"]
    for done in range(1, steps):
        with pytest.raises(requeue.Preempted, match=f"stopped after step {done}, with a checkpoint"):
            trained.train("chained", {"loss": "sigmoid"}, **SETTINGS)
    chained, again = trained.train("chained", {"loss": "sigmoid"}, **SETTINGS)
    assert describe_files(again.payload) == describe_files(work.payload)
    assert chained.run["steps_of_this_process"] == 1


@pytest.mark.parametrize(("seconds", "least"), [(None, 60), (3600, 60), (40, 10), (-5, 0)])
def test_a_short_job_is_not_all_leaving(monkeypatch, tmp_path, seconds, least):
    """Of a minute, most is gone when it begins to train; to leave at once would make no end of jobs."""
    monkeypatch.setattr(preemption, "ends_at", lambda: seconds and time.time() + seconds)
    assert preemption.PreemptionCallback(1000, tmp_path).min_seconds == pytest.approx(least, abs=0.1)


def test_a_training_that_stop_if_ends_is_over_and_leaves_nothing_to_go_on_with(tmp_path, ending):
    trained = Trained(tmp_path, "preference")
    told = {"loss": "sigmoid", "stop_if": {"margin_below": 1e9, "window": 1}}
    outcome, work = trained.train("stopped", told, **SETTINGS)
    assert outcome.about["stopped"]["step"] == 1
    assert not list((work.state / "checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize("requeues", [True, False])
def test_only_a_job_whose_time_is_up_is_queued_again(tmp_path, monkeypatch, requeues):
    asked = []
    monkeypatch.setattr(requeue, "requeued", lambda: asked.append(1) or requeues)
    monkeypatch.setattr(requeue, "SECONDS_TO_END", 0)
    requeue.raise_if_preempted(tmp_path)
    requeue.record_preemption(tmp_path, 7, "signal", first=True)
    with pytest.raises(requeue.Preempted, match="told to end \\(SIGTERM\\); run again"):
        requeue.raise_if_preempted(tmp_path)
    assert not asked
    requeue.record_preemption(tmp_path, 7, "deadline", first=False)
    assert json.loads(Path(tmp_path / requeue.FILE).read_text(encoding="utf-8"))["why"] == "signal"
    requeue.record_preemption(tmp_path, 7, "deadline", first=True)
    with pytest.raises(requeue.Preempted, match="stopped after step 7"):
        requeue.raise_if_preempted(tmp_path)
    assert asked
    requeue.clear_preemption(tmp_path)
    requeue.raise_if_preempted(tmp_path)


def test_what_a_checkpoint_took_is_known_to_the_next_job(tmp_path, monkeypatch):
    """Of 7B, the estimate for a slow disk is more than a short job has: it would leave after each step for ever."""
    monkeypatch.setattr(preemption, "ends_at", lambda: time.time() + 1800)
    first = preemption.PreemptionCallback(7_000_000_000, tmp_path)
    assert first._own_reason() == "deadline"
    first.on_step_begin()
    first.on_save()
    assert first._own_reason() is None
    again = preemption.PreemptionCallback(7_000_000_000, tmp_path)
    assert again.save_seconds < 60 and again._own_reason() is None
    (tmp_path / preemption.SAVE_SECONDS_FILE).write_text("{", encoding="utf-8")
    assert preemption.PreemptionCallback(7_000_000_000, tmp_path).save_seconds == pytest.approx(840)


def test_a_scheduler_that_did_not_answer_is_asked_again(tmp_path, monkeypatch):
    answers = [None, None, time.time() + 10, time.time() + 10]
    monkeypatch.setattr(preemption, "ends_at", lambda: answers.pop(0))
    callback = preemption.PreemptionCallback(1000, tmp_path)
    assert callback._own_reason() is None and len(answers) == 3
    monkeypatch.setattr(preemption, "RETRY_SECONDS", -1)
    assert callback._own_reason() is None
    callback.min_seconds = 60
    assert callback._own_reason() == "deadline" and not answers
