"""Curves of a training: every point once in every tracker, wherever it was killed; no data leaves the machine."""

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from snaketune.tracking.to_tensorboard import read_events

from .event_files import points_of
from .pipeline_runs import pack
from .tracking_runs import EVERYTHING, STEPS

# A key that a user may have in the environment; a tracker that isn't configured would use it.
API_KEY = "0123456789" * 4
TENSORBOARD = {}
KILLS = {
    "between a line and its checkpoint": ["log 8"],
    "before the first checkpoint": ["log 3"],
    "during a record": ["torn 11"],
    "during a checkpoint": ["save 8"],
    "again and again": ["log 6", "torn 7", "saved 8"],
}
UNDISTURBED, KILLED, MEANS, KILLED_MEANS, UNTRACKED, FAILING = (digit * 32 for digit in "0abcde")


def fingerprint(name: str) -> str:
    return f"{list(KILLS).index(name) + 1:08d}".ljust(32, "0")


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
            "HF_TOKEN": f"hf_{API_KEY}",
            "HF_ENDPOINT": trapped,
            "MLFLOW_TRACKING_URI": trapped,
            "TRACKIO_SERVER_URL": f"{trapped}?write_token={API_KEY}",
        }
        every = {"tracking": EVERYTHING, "environment": tempting}
        broken = {
            "tracking": {"wandb": {"online": True}, "mlflow": {"tracking_uri": refused}},
            "environment": {"WANDB_BASE_URL": refused, "WANDB_API_KEY": API_KEY, "WANDB_INIT_TIMEOUT": "1"}
            | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "WANDB_MODE": ""},
        }
        attempts = [
            {"fingerprint": UNDISTURBED} | every,
            *({"fingerprint": KILLED, "kill": kill} | every for kill in ("torn 11", None)),
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
                {"fingerprint": fingerprint(name), "name": "other", "kill": kill, "tracking": TENSORBOARD}
                for name, kills in KILLS.items()
                for kill in (*kills, None)
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


def assert_same_curves(actual, undisturbed) -> None:
    """Assert that both have the same curves, with every step once and in order, and equal training metrics."""
    curves = [defaultdict(list), defaultdict(list)]
    for points, by_curve in zip((actual, undisturbed), curves):
        for step, curve, value in points:
            by_curve[curve].append((step, pytest.approx(value, rel=1e-6) if curve.startswith("train/") else None))
    assert curves[0].keys() == curves[1].keys() >= {
        "train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "speed/tokens_per_second", "speed/mfu",
        "speed/memory_gb", "speed/supervised_tokens_per_second",
    }  # fmt: skip
    for curve, points in curves[0].items():
        assert [step for step, _ in points] == list(range(1, STEPS + 1)), curve
        other = [value for _, value in curves[1][curve]]
        assert all(a is b is None or a.expected == b for (_, a), b in zip(points, other)), curve


@pytest.mark.parametrize("purge", [False, True])
@pytest.mark.parametrize("name", KILLS)
def test_tensorboard_has_one_curve_without_a_seam_wherever_it_was_killed(runs, name, purge):
    points = points_of(runs / f"results/sft/other/tensorboard/{fingerprint(name)[:8]}", purge)
    assert_same_curves(points, points_of(runs / f"results/sft/demo/tensorboard/{UNDISTURBED[:8]}", purge))


def test_points_that_are_means_over_steps_are_the_same_after_a_resume(runs):
    undisturbed, killed = (
        [point for point in points_of(runs / f"results/sft/means/tensorboard/{each[:8]}") if point[1] == "train/loss"]
        for each in (MEANS, KILLED_MEANS)
    )
    assert [step for step, _, _ in undisturbed] == [1, 3, 6, 9, 12, 15, 18]
    assert killed == undisturbed


@pytest.mark.parametrize("tracker", ["trackio", "mlflow", "wandb"])
def test_every_other_tracker_has_one_curve_without_a_seam(runs, held, tracker):
    undisturbed = points_of(runs / f"results/sft/demo/tensorboard/{UNDISTURBED[:8]}")
    for fingerprint in (UNDISTURBED, KILLED):
        assert_same_curves(held[tracker][fingerprint], undisturbed)


def test_all_attempts_of_a_training_are_one_run_and_another_training_of_that_name_is_a_second_run(runs, held):
    parameters = held["runs"][KILLED][0][2]
    assert held["runs"] == {each: [["sft/demo", "FINISHED", parameters]] for each in (UNDISTURBED, KILLED)}
    assert parameters["training.learning_rate"] == "0.01"
    assert sorted(path.name for path in (runs / "results/sft/demo/tensorboard").iterdir()) == ["00000000", "aaaaaaaa"]
    for fingerprint in (UNDISTURBED, KILLED):
        (folder,) = (runs / "results/wandb").glob(f"*-{fingerprint}")
        assert folder.name.startswith("offline-run-")


def test_tensorboard_has_the_hyperparameters_once(runs):
    files = sorted((runs / "results/sft/demo/tensorboard/aaaaaaaa").iterdir())
    assert [path.name[-10:] for path in files] == ["0000000001", "0000000002"]
    parameters = [
        value
        for path in files
        for event in read_events(path)
        for value in event.summary.value
        if value.metadata.ByteSize()
    ]
    assert len(parameters) == 1
    assert b"training.learning_rate" in parameters[0].metadata.plugin_data.content


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
