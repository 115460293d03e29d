"""The RO-Crate of a pushed model: what it says of files, inputs, settings, scores and checks, and what it doesn't disclose."""

import hashlib
import json
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import write_manifest
from snaketune.errors import SnaketuneError
from snaketune.publishing.crate import CRATE, write_crate
from snaketune.publishing.push import _files_of

from . import invented
from .invented import files_of, write_handed_on

CHECK = {"name": "first steps = record", "compares": "figures", "status": "passed", "figure": 0.0, "tolerance": 0.0}
UNCHECKED = {"name": "snapshot", "compares": "weights", "status": "not checked", "figure": None, "tolerance": None}


@pytest.fixture
def replayed(monkeypatch):
    """A chain that was replayed too."""
    checks = [{"at_least": False, "reason": "in /home/me"} | check for check in (CHECK, UNCHECKED)]
    of_replay = {"verify.json": json.dumps({"checks": checks})}
    monkeypatch.setattr(invented, "files_of", lambda stage: of_replay if stage == "reproduction" else files_of(stage))
    monkeypatch.setattr(invented, "CHAIN", invented.CHAIN | {"reproduction/dpo-demo": {}})


def crate_of(folder: Path, monkeypatch) -> tuple[str, dict[str, dict]]:
    """Write the crate of an invented chain; return its text, and its entities by id."""
    write_handed_on(folder)
    monkeypatch.chdir(folder)
    files, _ = _files_of("dpo:demo", Path("results/push/demo"))
    path, _ = files[CRATE]
    content = json.loads(path.read_text(encoding="utf-8"))
    return path.read_text(encoding="utf-8"), {entity["@id"]: entity for entity in content["@graph"]}


def ids(value: dict | list) -> list[str]:
    return [one["@id"] for one in (value if isinstance(value, list) else [value])]


def test_files_have_the_digests_that_others_compute(tmp_path, monkeypatch):
    _, entities = crate_of(tmp_path, monkeypatch)
    weights = entities["model.safetensors"]
    content = (tmp_path / "results/dpo/demo/model/model.safetensors").read_bytes()
    assert weights["sha256"] == hashlib.sha256(content).hexdigest() and weights["contentSize"] == str(len(content))
    assert weights["identifier"].startswith("xxh3:")
    assert set(ids(entities["./"]["hasPart"])) == {"README.md", *files_of("dpo")}
    assert entities["README.md"]["encodingFormat"] == "text/markdown"
    (license,) = ids(entities["./"]["license"])
    assert entities[license]["name"] == "mit"


def test_each_result_is_an_action_with_what_it_read_and_made(tmp_path, monkeypatch, replayed):
    _, entities = crate_of(tmp_path, monkeypatch)
    assert set(ids(entities["./"]["mentions"])) == {f"#{key}" for key in invented.CHAIN}
    trained, first, replay = entities["#dpo/demo"], entities["#sft/demo"], entities["#reproduction/dpo-demo"]
    assert {"#results/sft/demo", "#results/pack/votes"} <= set(ids(trained["object"]))
    assert (
        set(ids(trained["result"]))
        == {*files_of("dpo")}
        == set(ids(replay["object"])) - {"#reproduction/dpo-demo/code"}
    )
    assert json.loads(entities["#sft/demo/spec"]["value"]) == invented.CHAIN["sft/demo"]["spec"]
    assert entities["#sft/demo/code"]["value"] == "c0de"
    assert entities[ids(first["instrument"])[0]]["softwareVersion"] == "c0ffee"
    assert first["description"] == "Repeated by: snakemake results/sft/demo/manifest.json"
    assert trained["endTime"] == entities["./"]["datePublished"] == "2026-11-28T04:20:12+00:00"
    assert entities["https://huggingface.co/datasets/open/votes"]["version"] == "f00"
    assert entities["#reproduction/dpo-demo/1"]["maxValue"] == 0.0
    assert entities["#reproduction/dpo-demo/2"]["value"] == "not checked"
    scores = [entities[one].get("value") for one in ids(entities["#eval/e/dpo-demo"]["result"])]
    assert 0.23279 in scores and 0.9079 in scores


def test_inputs_are_named_by_digest(tmp_path, monkeypatch):
    inputs = {"pack": ["aa"], "base": ["xxh3:bb", "xxh3:cc"]}
    monkeypatch.setitem(invented.CHAIN, "sft/demo", invented.CHAIN["sft/demo"] | {"inputs": inputs})
    _, entities = crate_of(tmp_path, monkeypatch)
    read = [entities[one]["value"] for one in ids(entities["#sft/demo"]["object"]) if "/inputs/" in one]
    assert read == ["xxh3:bb", "xxh3:cc", "aa"]


def test_it_is_the_same_each_time_and_discloses_no_host_or_folder(tmp_path, monkeypatch, replayed):
    base = {"path": "/home/me/models/base", "revision": None, "trust_remote_code": False}
    spec = invented.CHAIN["sft/demo"]["spec"] | {"base": base}
    change = {"spec": spec, "inputs": {"base": ["xxh3:bb"]}}
    monkeypatch.setitem(invented.CHAIN, "sft/demo", invented.CHAIN["sft/demo"] | change)
    one, entities = crate_of(tmp_path / "one", monkeypatch)
    assert one == crate_of(tmp_path / "two", monkeypatch)[0]
    assert json.loads(entities["#sft/demo/spec"]["value"])["base"]["path"] == "base"
    for private in (str(tmp_path), "/home/me", "secret.jsonl", "a-host"):
        assert private not in one


def test_another_result_than_the_cards_is_refused(tmp_path, monkeypatch):
    crate_of(tmp_path, monkeypatch)
    manifest = Path("results/pack/chat/manifest.json")
    write_manifest(manifest, json.loads(manifest.read_text()) | {"row_length": 1024})
    with pytest.raises(SnaketuneError, match=r"is of another results/pack/chat/manifest\.json; run: snakemake"):
        write_crate(Path("results/card/dpo-demo/manifest.json"), {}, tmp_path)
