"""`stop_if` ends a training after the same step, whatever the logging interval and however often it was killed."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from snaketune.engine.data_order import EpochPermutation
from snaketune.engine.packing.rows import EqualTokens
from snaketune.engine.pair_trainer import METRICS_STATE
from snaketune.packing.reader import open_rows
from snaketune.training import pipeline

from .pipeline_runs import Interrupted, stop_after
from .preference_runs import Trained

# A threshold that no training reaches; a training has nine steps.
HOPELESS = {"loss": "sigmoid", "stop_if": {"margin_below": 100.0, "from_step": 5, "window": 3}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def stopped(pairs) -> Any:
    """A training that wasn't interrupted."""
    return pairs.train("straight", HOPELESS)


def same_weights(one, other) -> bool:
    ours, theirs = (load_file(work.payload / "model.safetensors") for work in (one[1], other[1]))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_it_stops_after_that_step_and_reports_the_reason(pairs, capsys):
    outcome, work = pairs.train("loss_settings", HOPELESS)
    history = outcome.run["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5]
    stop = outcome.about["stopped"]
    assert stop == outcome.run["stopped"] and stop["step"] == outcome.counts["steps"] == 5
    means = [entry["margin"] for entry in history[2:]]
    assert min(means) <= float(stop["reason"].split()[1]) <= max(means)
    assert "over the last 3 steps is below 100" in stop["reason"]
    assert f"stopped early, after step 5: {stop['reason']}" in capsys.readouterr().out
    # The result is the model at that step.
    assert (work.payload / "model.safetensors").is_file()


@pytest.mark.parametrize("log_steps", [1, 100])
def test_only_the_tokens_of_finished_steps_are_counted(pairs, log_steps):
    outcome, _ = pairs.train(f"counted-{log_steps}", HOPELESS, log_steps=log_steps)
    rows = open_rows(pairs.packed, "train")
    # Five steps of four: an epoch of twelve rows, and eight of the next.
    order = EpochPermutation(12, seed=1, weights=EqualTokens(rows).pairs, batch=4)
    order.set_epoch(1)
    second = sum(int(rows[row]["segment_lengths"].sum()) for row in list(order)[:8])
    assert 0 < second < rows.tokens
    assert outcome.counts["tokens"] == rows.tokens + second


def test_a_stop_if_without_effect_is_reported(pairs, capsys):
    loss_settings = {"loss": "sigmoid", "stop_if": {"margin_below": 100.0, "from_step": 5, "window": 9}}
    outcome, _ = pairs.train("never", loss_settings)
    assert "stopped" not in outcome.about
    assert (
        "stop_if has no effect: it applies from step 9 on (window 9, from_step 5), and this training has 9 steps"
        in capsys.readouterr().out
    )
    pairs.train("just", loss_settings | {"stop_if": {"margin_below": 100.0, "window": 8}})
    assert "stop_if has no effect" not in capsys.readouterr().out


def test_the_logging_interval_has_no_effect(pairs, stopped):
    seldom = pairs.train("seldom", HOPELESS, log_steps=100)
    assert seldom[0].about["stopped"] == stopped[0].about["stopped"]
    assert [entry["step"] for entry in seldom[0].run["history"]] == [1, 5]
    assert same_weights(seldom, stopped)


@pytest.mark.parametrize("every", [1, 2, 4, 5])
def test_a_training_killed_before_the_stop_stops_at_the_same_step(pairs, stopped, monkeypatch, every):
    name = f"cut-off-{every}"
    if every < 5:
        with monkeypatch.context() as patch:
            stop_after(4 // every, patch)
            with pytest.raises(Interrupted):
                pairs.train(name, HOPELESS, every=every)
        assert (pairs.folder / name / "state/checkpoints/checkpoint-4").is_dir()
    resumed = pairs.train(name, HOPELESS, every=every)
    assert resumed[0].about["stopped"] == stopped[0].about["stopped"]
    assert same_weights(resumed, stopped)
    assert resumed[0].counts == stopped[0].counts
    # A retry would train on from a checkpoint of the last step.
    assert not (pairs.folder / name / "state/checkpoints/checkpoint-5").exists()


def test_a_training_killed_after_the_stop_stops_again(pairs, stopped, monkeypatch):
    def killed(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "save_trained", killed)
        with pytest.raises(Interrupted):
            pairs.train("killed", HOPELESS, every=1)
    again = pairs.train("killed", HOPELESS, every=1)
    assert again[0].about["stopped"] == stopped[0].about["stopped"]
    assert same_weights(again, stopped)


def test_a_good_training_runs_to_its_end(pairs):
    loss_settings = {
        "loss": "sigmoid",
        "stop_if": {"margin_below": -5.0, "chosen_reward_below": -50, "kl_above": 500, "window": 1},
    }
    outcome, _ = pairs.train("well", loss_settings)
    plain, _ = pairs.train("plain", {"loss": "sigmoid"})
    assert outcome.counts["steps"] == 9 and "stopped" not in outcome.about
    assert [entry["loss"] for entry in outcome.run["history"]] == [entry["loss"] for entry in plain.run["history"]]


def test_a_stop_at_the_last_step_is_not_early(pairs):
    outcome, _ = pairs.train("last", HOPELESS | {"stop_if": {"margin_below": 100.0, "from_step": 9, "window": 1}})
    assert outcome.counts["steps"] == 9 and "stopped" not in outcome.about


def test_windows_and_warnings_are_restored_exactly(pairs, monkeypatch):
    loss_settings = {"loss": "sigmoid", "stop_if": {"kl_above": 1e6, "window": 7}}

    def monitor_state(name: str) -> dict[str, Any]:
        (checkpoint,) = (pairs.folder / name / "state/checkpoints").glob("checkpoint-*")
        return json.loads((checkpoint / METRICS_STATE).read_text(encoding="utf-8"))["monitor"]

    pairs.train("whole", loss_settings, every=8)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            pairs.train("parts", loss_settings, every=4)
    pairs.train("parts", loss_settings, every=4)
    assert monitor_state("whole") == monitor_state("parts") and monitor_state("whole")["done"] >= 8
