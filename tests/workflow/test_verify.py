"""`snakemake verify` on a real run: every check of its SFT and DPO model, what stays as it is, and how a failed check ends."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snaketune.__main__ import main
from snaketune.artifacts.manifest import describe_files, read_artifact, write_manifest
from snaketune.config.load import load
from snaketune.diagnostics import verification
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile, job_file_of, write_job_file

from .conftest import Project

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def verified(finished, tmp_path_factory) -> Project:
    project = finished.copy_to(tmp_path_factory.mktemp("verify") / "project")
    project.config["verify"] = {"rows": 3}
    return project


def checks_of(project: Project, name: str, work: WorkFolder) -> dict[str, dict]:
    """Make the checks of a training in this process."""
    job = JobGraph(*load(project.config)).job("verification", name)
    inputs = {role: [result_at(project.folder / one.manifest) for one in jobs] for role, jobs in job.artifacts.items()}
    single = {
        role: inputs[role][0] if not definition.many else inputs[role]
        for role, definition in verification.STAGE.inputs.items()
    }
    work.start()
    verification.build(job.spec, work, operation=job.operation, **single)
    content = json.loads((work.payload / "verify.json").read_text(encoding="utf-8"))
    return {check["name"]: check for check in content["checks"]}


def test_every_check_of_a_right_training_passes_or_says_why_not(verified, tmp_path, monkeypatch):
    assert verified.stale("verify") == {"verification", "verify"}
    assert verified.stale() == set()
    monkeypatch.chdir(verified.folder)
    not_checked = {"sft-run": {"GGUF = Hugging Face", "merged = base + adapter", "reference log-probs = anew"}}
    not_checked["dpo-run"] = not_checked["sft-run"] - {"reference log-probs = anew"}
    for name, expected in not_checked.items():
        found = checks_of(verified, name, WorkFolder(tmp_path / name))
        statuses = {check: result["status"] for check, result in found.items()}
        # It learns nothing in its few steps, and measures no held-out rows at their end.
        unlearned = {"end of turn learned", "saved = in memory"}
        assert {check for check, status in statuses.items() if status == "not checked"} - unlearned == expected, found
        assert {check for check, status in statuses.items() if status == "failed"} <= unlearned, found
        assert len(found) == 12 and all(one["reason"] for one in found.values() if one["status"] == "not checked")


def test_a_weight_that_was_changed_after_the_evaluation_fails(verified, tmp_path, monkeypatch):
    project = verified.copy_to(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    folder = project.folder / "results/sft/run"
    weights = load_file(folder / "model/model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] += torch.ones_like(weights[name])
    (folder / "model/model.safetensors").unlink()
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    manifest = read_artifact(folder / "manifest.json", "model").manifest
    described = describe_files(folder / "model")
    write_manifest(folder / "manifest.json", manifest | {"payload": described})
    found = checks_of(project, "sft-run", WorkFolder(tmp_path / "work"))
    assert found["evaluation = transformers"]["status"] == "failed"
    # What doesn't depend on it isn't blamed.
    for check in ("packed = alone", "micro-batch 1 = all", "trained prompt = generate's", "supervised = answer"):
        assert found[check]["status"] == "passed", found[check]


def test_a_file_that_changed_since_the_checks_fails(verified, tmp_path, monkeypatch, capsys):
    project = verified.copy_to(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    job = JobGraph(*load(project.config)).job("verification", "dpo-run")
    inputs = {role: tuple(one.manifest for one in jobs) for role, jobs in job.artifacts.items()}
    job_file = JobFile(stage="verification", out=job.folder, spec={}, inputs=inputs)
    write_job_file(job_file_of("verification", "dpo-run"), job_file, None)
    (Path(job.folder) / "checks").mkdir(parents=True)
    write_json(Path(job.folder) / "checks/verify.json", {"checks": []})
    write_manifest(
        Path(job.manifest),
        {"payload": describe_files(Path(job.folder) / "checks"), "records": {}, "stage": "verification"},
    )
    assert main(["verify", job.manifest]) == 0
    (scores,) = Path("results/eval").glob("*/dpo-run/scores/scores.json")
    for path in (Path("results/dpo/run/model/model.safetensors"), scores):
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.unlink()
        path.write_bytes(content)
    capsys.readouterr()
    assert main(["verify", job.manifest]) == 1
    said = capsys.readouterr().out
    for path in ("results/dpo/run/model/model.safetensors", str(scores)):
        assert f"! {path} is damaged" in said, said
    assert "no check failed, 2 results are damaged" in said
    job_file_of("verification", "dpo-run").unlink()
    assert main(["verify", job.manifest]) == 0
    assert "the files that were checked aren't compared with their digests" in capsys.readouterr().out


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_the_target_ends_with_an_error_after_all_results_if_a_check_failed(tmp_path, capsys, status):
    manifests = []
    for name, of in (("sft-a", status), ("sft-b", "passed")):
        folder = tmp_path / "results/verification" / name
        check = {"name": "packed = alone", "compares": "loss", "status": of, "figure": 0.5}
        check |= {"tolerance": 0.1, "at_least": False, "reason": ""}
        (folder / "checks").mkdir(parents=True)
        write_json(folder / "checks/verify.json", {"checks": [check]})
        payload = {"payload": describe_files(folder / "checks"), "records": {}, "stage": "verification"}
        write_manifest(folder / "manifest.json", payload)
        write_json(folder / "run.json", {"seconds": 3.0})
        manifests.append(str(folder / "manifest.json"))
    assert main(["verify", *manifests]) == (status == "failed")
    said = capsys.readouterr().out
    assert "sft-a, checked in 3 s" in said and "sft-b, checked in 3 s" in said
    assert Counter(line[:1] for line in said.splitlines())["!"] == (status == "failed")


def test_runs_with_equal_settings_are_checked_once(verified, monkeypatch):
    monkeypatch.chdir(verified.folder)
    config = copy.deepcopy(verified.config)
    config["sft"]["again"] = {"extends": "run"}
    config["eval"]["both"]["models"] = [*config["eval"]["both"]["models"], "sft:again"]
    graph = JobGraph(*load(config))
    assert {job.name for job in graph.stage("verification")} == {"sft-run", "sft-again", "dpo-run"}
    assert "results/verification/sft-again/manifest.json" in graph.same_as
