"""Jobs in environments of their own, with fake conda and apptainer programs."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from snaketune.stages.table import STAGES

from .conftest import ROOT, Project, copy_code
from .test_pins import write_channel

pytestmark = pytest.mark.workflow
SHIMS = Path(__file__).parent / "shims"
CORPUS = "results/corpus/chat/manifest.json"


@pytest.fixture
def clone(tmp_path) -> Project:
    """Before any run, with a copy of the code, so that an image can be put there."""
    copy_code(tmp_path / "code")
    return Project(tmp_path / "project", code=tmp_path / "code").write_data()


def put_first(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.slow
def test_a_rule_runs_in_the_image(clone, monkeypatch):
    put_first(monkeypatch, SHIMS)
    image = clone.code / "envs/snaketune.sif"
    python = image / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {image}/pythons\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    clone.snakemake("--sdm=apptainer", "--apptainer-args=--nv", CORPUS)
    assert json.loads(clone.read(CORPUS))["payload"]
    (job,) = [json.loads(line) for line in (image / "jobs").read_text(encoding="utf-8").splitlines()]
    # It sees the working directory and the package, wherever that is, and imports that one.
    assert job["home"] == str(clone.folder)
    assert str(clone.code) in job["bind"]
    assert job["nv"]
    (imported,) = re.findall(r"PYTHONPATH=(\S+)", job["command"][-1])
    assert Path(shlex.split(imported)[0]) == clone.code / "workflow"
    # The image's libraries computed it.
    assert (image / "pythons").read_text(encoding="utf-8") == "-m snaketune corpus results/.jobs/corpus/chat.json\n"


def test_a_missing_image_is_reported_before_anything_runs(clone, monkeypatch):
    put_first(monkeypatch, SHIMS)
    said = clone.snakemake("--sdm=apptainer", CORPUS, check=False)
    assert f"{clone.code}/envs/snaketune.sif doesn't exist" in said
    assert "docs/platforms.md" in said
    assert not (clone.folder / "results/corpus").exists()


@pytest.mark.slow
def test_blanks_in_the_checkouts_path_matter_only_with_an_image(tmp_path):
    copy_code(tmp_path / "my code")
    project = Project(tmp_path / "project", code=tmp_path / "my code").write_data()
    assert "corpus/chat" in project.snakemake("-n", CORPUS)


def test_a_rule_runs_in_its_conda_environment(fresh, monkeypatch, tmp_path):
    put_first(monkeypatch, SHIMS / "conda/bin")
    monkeypatch.setenv("CONDA_CHANNEL_INDEX", str(write_channel(tmp_path / "channel")))
    said = fresh.snakemake("--sdm=conda", CORPUS)
    (activated,) = re.findall(r"Activating conda environment: (\S+)", said)
    environment = fresh.folder / activated
    assert (environment / "environment.yaml").read_text() == (ROOT / "envs/data.yaml").read_text()
    assert (environment / "jobs").read_text(encoding="utf-8") == "-m snaketune corpus results/.jobs/corpus/chat.json\n"
    assert "Nothing to be done" in fresh.snakemake(CORPUS)


def test_an_environment_that_cant_be_made_stops_before_anything_runs(fresh, monkeypatch, tmp_path):
    put_first(monkeypatch, SHIMS / "conda/bin")
    monkeypatch.setenv("CONDA_CHANNEL_INDEX", str(write_channel(tmp_path / "channel", regex="2026.1.1")))
    said = fresh.snakemake("--sdm=conda", CORPUS, check=False)
    assert "not available from current channels: regex=" in said
    assert not (fresh.folder / "results/corpus").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_each_rule_has_the_environment_of_its_kind_of_work(stage):
    # llama.cpp's converter reads weights with torch.
    trains = {"sft", "ref_pass", "ref_logps", "teacher", "teacher_pass", "dpo", "reward", "preflight", "calibrate"}
    trains |= {"timing", "convert", "merge", "verification", "reproduction"}
    generates = {"eval", "prompts", "generate", "sample", "judge", "compare", "rate"}
    kind = "train" if stage in trains else "eval" if stage in generates else "data"
    rule = (ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8")
    assert re.search(r'conda:\n +"../../envs/(\w+).yaml"', rule)[1] == kind
