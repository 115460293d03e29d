"""Validation of `tracking:`; keys and tokens are refused, and no message repeats them."""

import importlib.util
import json

import pytest

from snaketune.__main__ import main
from snaketune.config.load import load
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError

KEY = "0123456789abcdef" * 2 + "01234567"
CORPORA = {"chat": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "main"}}]}}


def test_the_default_is_tensorboard_alone_and_nothing_is_uploaded():
    tracking = load({"corpora": CORPORA})[0].tracking
    assert tracking == Tracking(tensorboard=True, wandb=None, trackio=False, mlflow=None)
    assert not load({"corpora": CORPORA, "tracking": {"wandb": {}}})[0].tracking.wandb.online


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wandb": {"api_key": KEY}}, "tracking: unknown key api_key; keys and tokens don't belong in a config"),
        ({"wandb": {"entity": KEY}}, "tracking: the value of entity looks like an API key"),
        ({"wandb": KEY}, "tracking: the value of wandb looks like an API key"),
        ({"token": [KEY]}, "tracking: unknown key token;"),
        ({"mlflow": {"password": KEY}}, "tracking: unknown key password;"),
        ({"trackio": f"hf_{KEY}"}, "tracking: the value of trackio looks like an API key"),
        (
            {"mlflow": {"tracking_uri": f"https://me:{KEY}@example.org"}},
            "tracking.mlflow.tracking_uri: contains a user or a password",
        ),
    ],
)
def test_a_secret_is_refused_and_not_repeated(given, message, capfd):
    with pytest.raises(SnaketuneError) as caught:
        load({"corpora": CORPORA, "tracking": given})
    assert message in str(caught.value)
    assert KEY not in str(caught.value)


def test_an_invalid_job_file_is_reported_with_its_key(capfd, tmp_path):
    job_file = tmp_path / "sft.json"
    content = {"stage": "sft", "out": "sft", "spec": {}, "inputs": {}, "tracking": {"wandb": {"entity": 5}}}
    job_file.write_text(json.dumps(content), encoding="utf-8")
    assert main(["sft", str(job_file)]) == 1
    assert "sft.json is no job file: tracking.wandb.entity: Input should be a valid string" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wandbb": {}}, "tracking.wandbb: unknown key; did you mean 'wandb'?"),
        ({"wandb": {"entty": "me"}}, "tracking.wandb.entty: unknown key; did you mean 'entity'?"),
        ({"project": "my project"}, "tracking.project: found 'my project'"),
        ({"wandb": True}, "tracking.wandb: found true, which isn't a valid value for this key"),
        ({"trackio": "yes please"}, "tracking.trackio: found 'yes please'"),
    ],
)
def test_invalid_values_are_reported_with_their_key(given, message):
    with pytest.raises(SnaketuneError) as caught:
        load({"corpora": CORPORA, "tracking": given})
    assert message in str(caught.value)


def test_a_missing_tracker_package_is_reported_before_anything_runs(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("snaketune.config.tracking.find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(SnaketuneError, match=r"tracking.wandb: needs wandb, .*: pip install 'snaketune\[tracking\]'"):
        load({"corpora": CORPORA, "tracking": {"wandb": {}}})
    assert load({"corpora": CORPORA, "tracking": {"trackio": True}})
