"""`python -m snaketune replay`: a finished training's first steps, and those after its snapshot, compared with the record."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from snaketune.__main__ import main
from snaketune.artifacts.manifest import Artifact
from snaketune.diagnostics import replay
from snaketune.errors import SnaketuneError
from snaketune.files import write_json

pytestmark = pytest.mark.workflow


def replayed(manifest: str, name: str, steps: int = 2) -> tuple[int, dict[str, dict]]:
    status = main(["replay", manifest, "--steps", str(steps)])
    checks = json.loads(Path(f"results/replay/{name}/verify.json").read_text(encoding="utf-8"))["checks"]
    return status, {check["name"]: check for check in checks}


def test_the_first_steps_are_those_of_the_record_also_of_another_clone(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    before = {path: path.stat().st_mtime_ns for path in Path("results").glob("*/*/manifest.json")}
    # What a reader of a published model has, beside a clone of their own.
    theirs = Path("theirs/sft/run")
    theirs.mkdir(parents=True)
    for name in ("manifest.json", "run.json"):
        shutil.copy(f"results/sft/run/{name}", theirs / name)
    shutil.rmtree("results/sft")
    status, found = replayed(str(theirs / "manifest.json"), "sft-run")
    assert status == 0, found
    lines = found["first steps = record"]
    assert (lines["status"], lines["figure"]) == ("passed", 0) and "same kind of machine" in lines["compares"]
    assert found["steps from snapshot = record"]["status"] == "not checked"
    assert not Path("results/sft").exists() and not Path("results/.replay").exists()
    assert {path: path.stat().st_mtime_ns for path in before if path.exists()} == {
        path: time for path, time in before.items() if path.parts[1] != "sft"
    }


@pytest.mark.slow
def test_steps_from_a_snapshot_lead_to_the_same_weights(finished, tmp_path, monkeypatch):
    project = finished.copy_to(tmp_path / "project")
    project.config["sft"]["run"]["training"] |= {"seed": 5, "snapshots": [0.5]}
    project.snakemake("results/sft/run/manifest.json")
    monkeypatch.chdir(project.folder)
    status, found = replayed("results/sft/run/manifest.json", "sft-run", steps=200)
    assert status == 0 and all(check["status"] == "passed" for check in found.values()), found
    expected = {"inputs = recorded", "first steps = record", "steps from snapshot = record"}
    assert found.keys() == expected | {"snapshot = record", "weights = record"}


def recorded(tmp_path, **changes) -> replay.Record:
    manifest = {"stage": "sft", "spec": {"training": {"until": None}}, "inputs": {"pack": ["a"]}, "code": "c"}
    manifest |= {"versions": {"torch": "2"}, "dtype": "float32"} | changes.pop("manifest", {})
    run = {"device": "cpu", "threads": 1, "history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]} | changes
    return replay.Record(result=Artifact(tmp_path / "manifest.json", manifest, tmp_path), run=run)


def test_another_loss_fails_on_the_same_machine_and_rounding_passes_elsewhere(tmp_path):
    record = recorded(tmp_path)

    def lines(loss: float, **changes):
        other = recorded(tmp_path, **changes)
        run = other.run | {"history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": loss}]}
        return replay._same_lines("first steps = record", record, other.result, run, 0)

    assert lines(1.0).status == "passed"
    check = lines(1.0 + 1e-6)
    assert check.status == "failed" and check.reason == "loss of step 2"
    check = lines(1.0 + 1e-6, threads=4, manifest={"versions": {"torch": "3"}})
    assert check.status == "passed" and "another threads, torch" in check.compares
    assert lines(1.1, threads=4).status == "failed"


def test_other_inputs_or_another_spec_fail_by_name(tmp_path):
    record = recorded(tmp_path)
    assert replay._same_inputs(record, recorded(tmp_path).result).status == "passed"
    other = {"inputs": {"pack": ["b"]}, "spec": {"training": {"until": 0.5, "seed": 1}}}
    check = replay._same_inputs(record, recorded(tmp_path, manifest=other).result)
    assert check.status == "failed" and check.reason.startswith("pack, spec")


def test_a_result_without_a_history_is_refused(tmp_path):
    folder = tmp_path / "sft/run"
    folder.mkdir(parents=True)
    shown = SimpleNamespace(manifest={"stage": "sft"})
    write_json(folder / "run.json", {"history": []})
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SnaketuneError, match="has no history to compare with"):
        patched.setattr(replay, "result_at", lambda manifest: shown)
        replay.Record.of(folder / "manifest.json")
