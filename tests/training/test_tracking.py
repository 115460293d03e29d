"""Curves of a training: every point once in TensorBoard, wherever it was killed, and in the other trackers at least once; no
data leaves the machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .event_files import SPEED, points_of
from .pipeline_runs import pack
from .tracking_runs import EVERYTHING, STEPS

# One long run of attempts, with all trackers.
pytestmark = pytest.mark.slow
# A key that a user may have in the environment; a tracker that isn't configured would use it.
API_KEY = "0123456789" * 4
TENSORBOARD = {}
# Before the first checkpoint, after one, between a line and its checkpoint, during a checkpoint, and right after it.
KILLS = ("log 3", "log 7", "log 8", "save 8", "saved 8")
UNDISTURBED, KILLED, MEANS, KILLED_MEANS, UNTRACKED, FAILING, AGAIN = (digit * 32 for digit in "0abcdef")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder in which all attempts ran."""
    root = tmp_path_factory.mktemp("tracked")
    pack(root / "pack")
    with socket.socket() as trap, socket.socket() as closed:
        for server in (trap, closed):
            server.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        trapped, refused = (f"http://127.0.0.1:{server.getsockname()[1]}" for server in (trap, closed))
        tempting = {
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "WANDB_BASE_URL"), trapped),
            "WANDB_MODE": "online",
            "WANDB_API_KEY": API_KEY,
            "MLFLOW_TRACKING_URI": trapped,
            "TRACKIO_SERVER_URL": f"{trapped}?write_token={API_KEY}",
            "TRACKIO_SPACE_ID": "someone/space",
        }
        every = {"tracking": EVERYTHING, "environment": tempting}
        broken = {
            "tracking": {"wandb": {"online": True}, "mlflow": {"tracking_uri": refused}},
            "environment": {"WANDB_BASE_URL": refused, "WANDB_API_KEY": API_KEY, "WANDB_INIT_TIMEOUT": "1"}
            | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "WANDB_MODE": ""},
        }
        attempts = [
            {"fingerprint": UNDISTURBED} | every,
            *({"fingerprint": KILLED, "kill": kill} | every for kill in ("log 11", None)),
            {"fingerprint": UNTRACKED, "tracking": None},
            *(
                {"fingerprint": each, "name": "means", "log_steps": 3, "kill": kill, "tracking": TENSORBOARD}
                for each, kill in (
                    (MEANS, None),
                    (KILLED_MEANS, "saved 4"),
                    (KILLED_MEANS, "log 12"),
                    (KILLED_MEANS, None),
                )
            ),
            {"fingerprint": FAILING, "name": "failing", "full": 5, "watched": False} | broken,
            *(
                {"fingerprint": AGAIN, "name": "other", "kill": kill, "tracking": TENSORBOARD}
                for kill in (*KILLS, None)
            ),
        ]
        (root / "attempts.json").write_text(json.dumps({"attempts": attempts, "held": [UNDISTURBED, KILLED]}))
        done = subprocess.run(
            [sys.executable, "-m", "tests.training.tracking_runs", str(root)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        output = done.stdout + "".join(path.read_text() for path in sorted(root.glob("*.log")))
        assert done.returncode == 0, output[-6000:]
        exits = json.loads((root / "exits.json").read_text())
        assert exits == [-9 if how.get("kill") else 0 for how in attempts], output[-6000:]
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert (root / "sockets").read_text() == ""
    return root


@pytest.fixture(scope="module")
def held(runs) -> dict:
    return json.loads((runs / "held.json").read_text())


def curves(points) -> dict[str, list[tuple[int, float]]]:
    """The points of each curve in order of steps, but for those of speed."""
    return {
        curve: sorted((step, value) for step, other, value in points if other == curve)
        for curve in {curve for _, curve, _ in points}
        if curve.removeprefix("train/") not in SPEED
    }


@pytest.fixture(scope="module")
def undisturbed(runs) -> dict[str, list[tuple[int, float]]]:
    return curves(points_of(runs / f"results/sft/demo/tensorboard/{UNDISTURBED[:8]}"))


def test_every_metric_is_a_curve_with_a_point_for_each_step(runs, undisturbed):
    points = points_of(runs / f"results/sft/demo/tensorboard/{UNDISTURBED[:8]}")
    learned = {"train/loss", "train/grad_norm", "train/learning_rate", "train/epoch"}
    speed = {f"train/{name}" for name in SPEED}
    assert {curve for _, curve, _ in points} == learned | speed
    assert undisturbed.keys() == learned
    for each in learned | speed:
        assert [step for step, curve, _ in points if curve == each] == list(range(1, STEPS + 1))


def test_tensorboard_has_one_curve_without_a_seam_wherever_it_was_killed(runs, undisturbed):
    assert curves(points_of(runs / f"results/sft/other/tensorboard/{AGAIN[:8]}")) == undisturbed


def test_points_that_are_means_over_steps_are_the_same_after_a_resume(runs):
    undisturbed, killed = (
        curves(points_of(runs / f"results/sft/means/tensorboard/{each[:8]}"))["train/loss"]
        for each in (MEANS, KILLED_MEANS)
    )
    assert [step for step, _ in undisturbed] == [1, 3, 6, 9, 12, 15, 18]
    assert killed == undisturbed


@pytest.mark.parametrize("tracker", ["trackio", "mlflow", "wandb"])
def test_every_other_tracker_has_the_same_points_and_repeats_those_that_were_computed_again(held, undisturbed, tracker):
    assert rounded(curves(held[tracker][UNDISTURBED])) == rounded(undisturbed)
    killed = rounded(curves(held[tracker][KILLED]))
    for curve, points in rounded(undisturbed).items():
        # The process was killed after step 11, perhaps before its tracker stored the last seconds, and resumed after step 8.
        assert {point for point in points if point[0] > 8} <= set(killed[curve])
        assert set(killed[curve]) <= set(points)
        assert {step for step, _ in killed[curve] if [at for at, _ in killed[curve]].count(step) > 1} <= {9, 10, 11}


def rounded(curves) -> dict[str, list[tuple[int, float]]]:
    """To the float32 of TensorBoard."""
    return {name: [(step, float(np.float32(value))) for step, value in points] for name, points in curves.items()}


def test_all_attempts_of_a_training_are_one_run_and_another_training_of_that_name_is_a_second_run(runs, held):
    parameters = held["runs"][KILLED][0][3]
    assert held["runs"] == {each: [["sft/demo", "sft", "FINISHED", parameters]] for each in (UNDISTURBED, KILLED)}
    assert parameters["training.learning_rate"] == "0.01"
    assert sorted(path.name for path in (runs / "results/sft/demo/tensorboard").iterdir()) == ["00000000", "aaaaaaaa"]
    assert len(list((runs / "results/wandb").glob(f"offline-run-*-{UNDISTURBED}"))) == 1
    for each in (UNDISTURBED, KILLED):
        config = held["trackio runs"][each]
        assert config["_Group"] == "sft"
        assert {name: str(value) for name, value in config.items() if not name.startswith("_")} == parameters


def test_tensorboard_has_the_hyperparameters(runs):
    events = EventAccumulator(str(runs / "results/sft/demo/tensorboard/aaaaaaaa")).Reload()
    (parameters,) = events.PluginTagToContent("hparams").values()
    assert b"training.learning_rate" in parameters


def test_no_path_of_this_machine_is_sent_to_weights_and_biases(runs):
    (folder,) = (runs / "results/wandb").glob(f"offline-run-*-{UNDISTURBED}")
    assert str(runs).encode() not in (folder / f"run-{UNDISTURBED}.wandb").read_bytes()


def test_no_key_is_written_anywhere(runs):
    files = [path for path in runs.rglob("*") if path.is_file() and path.name != "attempts.json"]
    assert len(files) > 100
    assert not [path for path in files if API_KEY.encode() in path.read_bytes()]


def test_a_training_learns_the_same_with_all_trackers_and_with_none(runs):
    tracked, untracked = (
        load_file(runs / f"results/.work/sft/{each}/payload.partial/model.safetensors") for each in (KILLED, UNTRACKED)
    )
    assert tracked.keys() == untracked.keys()
    assert all(tracked[name].equal(untracked[name]) for name in tracked)
    assert "wandb" not in (runs / f"{UNTRACKED}.log").read_text()


def test_a_tracker_that_fails_is_reported_once_and_the_training_continues(runs):
    log = (runs / f"{FAILING}.log").read_text()
    for tracker in ("tensorboard", "wandb", "mlflow"):
        assert log.count(f"tracking.{tracker} failed and is not used any more; the training continues") == 1, log
    assert "OSError: [Errno 28] No space left on device" in log
    assert "step 18/18" in log
    # The points before the disk was full.
    points = points_of(runs / f"results/sft/failing/tensorboard/{FAILING[:8]}")
    assert [step for step, curve, _ in points if curve == "train/loss"] == [1, 2, 3, 4]
