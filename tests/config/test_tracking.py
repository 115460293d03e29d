"""`tracking:`: what it refuses, above all keys and tokens, which no message of ours repeats."""

import importlib.util
import json

import pytest

from snaketune.__main__ import main
from snaketune.config.load import load
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError

KEY = "0123456789abcdef" * 2 + "01234567"
CORPORA = {"chat": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "main"}}]}}


def test_tensorboard_alone_draws_where_nothing_is_said_and_nothing_goes_online():
    tracking = load({"corpora": CORPORA})[0].tracking
    assert tracking == Tracking(tensorboard=True, wandb=None, trackio=False, mlflow=None)
    assert not load({"corpora": CORPORA, "tracking": {"wandb": {}}})[0].tracking.wandb.online


@pytest.mark.parametrize(
    ("given", "told"),
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
def test_a_secret_is_refused_and_not_repeated(given, told, capfd):
    with pytest.raises(SnaketuneError) as caught:
        load({"corpora": CORPORA, "tracking": given})
    assert told in str(caught.value)
    assert KEY not in str(caught.value)


def test_by_hand_too(capfd, tmp_path):
    job_file = tmp_path / "sft.json"
    content = {"stage": "sft", "out": "sft", "spec": {}, "inputs": {}, "tracking": {"wandb": {"entity": 5}}}
    job_file.write_text(json.dumps(content), encoding="utf-8")
    assert main(["sft", str(job_file)]) == 1
    assert "sft.json is no job file: tracking.wandb.entity: Input should be a valid string" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"wandbb": {}}, "tracking.wandbb: unknown key; did you mean 'wandb'?"),
        ({"wandb": {"entty": "me"}}, "tracking.wandb.entty: unknown key; did you mean 'entity'?"),
        ({"project": "my project"}, "tracking.project: found 'my project'"),
        ({"wandb": True}, "tracking.wandb: found true, which isn't a valid value for this key"),
        ({"trackio": "yes please"}, "tracking.trackio: found 'yes please'"),
    ],
)
def test_what_it_does_not_know_is_told(given, told):
    with pytest.raises(SnaketuneError) as caught:
        load({"corpora": CORPORA, "tracking": given})
    assert told in str(caught.value)


def test_a_tracker_that_is_not_installed_is_told_before_anything_runs(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("snaketune.config.tracking.find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(SnaketuneError, match=r"tracking.wandb: needs wandb, .*: pip install 'snaketune\[tracking\]'"):
        load({"corpora": CORPORA, "tracking": {"wandb": {}}})
    assert load({"corpora": CORPORA, "tracking": {"trackio": True}})
