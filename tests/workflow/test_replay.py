"""`snakemake replay` and `python -m snaketune replay`: the first steps of a finished training, and those after its snapshot,
compared with the record."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from snaketune.__main__ import main
from snaketune.artifacts.manifest import Artifact
from snaketune.diagnostics import replay, replay_command
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
    assert not Path("results/sft").exists() and not [*Path("results/.work/replay").glob("*")]
    assert {path: path.stat().st_mtime_ns for path in before if path.exists()} == {
        path: time for path, time in before.items() if path.parts[1] != "sft"
    }


@pytest.mark.slow
def test_the_target_replays_each_training_by_a_job_and_ends_with_an_error_if_a_figure_differs(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    assert project.stale("replay") == {"reproduction", "replay"} and project.stale() == set()
    run = project.folder / "results/dpo/run/run.json"
    recorded = json.loads(run.read_text(encoding="utf-8"))
    recorded["history"][0]["loss"] += 0.5
    write_json(run, recorded)
    said = project.snakemake("replay", check=False)
    assert "! failed" in said and "1 checks failed" in said and "loss of step 1" in said
    statuses = {}
    for name in ("sft-run", "dpo-run"):
        folder = project.folder / "results/reproduction" / name
        counts = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["counts"]
        statuses[name] = (counts["passed"], counts["failed"], counts["not checked"])
        work = project.folder / "results/.work/reproduction"
        assert not [*work.glob("*/state")]
    # Inputs and log lines; no snapshot is kept.
    assert statuses == {"sft-run": (2, 0, 1), "dpo-run": (1, 1, 1)}
    assert project.stale("replay") == {"replay"}


def test_the_share_at_which_a_replay_ends_is_that_of_the_whole_run(tmp_path):
    for whole, until in ((10, None), (2082, None), (2082, 0.37), (7, 0.5), (1000, 0.001), (3, 1.0)):
        steps = math.ceil(whole * (until or 1.0))
        lines = [{"step": step} for step in range(1, steps + 1)]
        record = recorded(tmp_path, history=lines, manifest={"spec": {"training": {"until": until}}})
        assert record.share(steps) == until
        assert all(math.ceil(record.share(end) * whole) == end for end in range(1, steps))


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
    shown = SimpleNamespace(manifest={"stage": "sft"}, manifest_path=folder / "manifest.json")
    write_json(folder / "run.json", {"history": []})
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SnaketuneError, match="has no history to compare with"):
        patched.setattr(replay_command, "result_at", lambda manifest: shown)
        replay_command.read_record(folder / "manifest.json")
