"""Distillation as a whole: what edits rerun, a kill in the teacher's pass, and the report."""

import json
import os
import signal
import subprocess
import time

import pytest

from .command_line import environment
from .conftest import Project
from .test_survival import processes, wait_until_ended

pytestmark = [pytest.mark.workflow, pytest.mark.slow]


@pytest.fixture
def taught(project) -> Project:
    config = project.config
    config["sft"]["big"] = json.loads(json.dumps(config["sft"]["run"]))
    config["sft"]["run"]["distill"] = {"teacher": "big"}
    config["teacher"] = {"big": {"model": "sft:big", "operation": {"gpus": 0, "parts": 2}}}
    config["eval"]["both"]["models"] = ["base:run", "sft:big", "sft:run"]
    config["eval"]["both"]["teacher_of"] = "run"
    config["dpo"] = {}
    config.pop("report", None)
    return project


def test_a_teacher_is_computed_once_and_a_killed_pass_continues(taught, tmp_path):
    undisturbed = taught.copy_to(tmp_path / "undisturbed")
    undisturbed.config["teacher"]["big"]["operation"]["parts"] = 1
    undisturbed.snakemake()
    running = subprocess.Popen(
        taught.command(), cwd=taught.folder, env=environment(), process_group=0, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while running.poll() is None and not (found := processes("snaketune teacher_pass ", taught.folder)):
        time.sleep(0.02)
    assert found
    for number in found:
        os.kill(number, signal.SIGKILL)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    wait_until_ended(taught)
    taught.snakemake("--unlock")
    taught.snakemake()
    # The same bytes, in two parts and in one.
    (teacher,) = (path.name for path in (taught.folder / "results/teacher").iterdir())
    for result in (f"teacher/{teacher}", "sft/run"):
        manifests = [json.loads(one.read(f"results/{result}/manifest.json")) for one in (taught, undisturbed)]
        assert manifests[0]["payload"] == manifests[1]["payload"]
    # The report compares before and after, and shows where the student parts from the teacher.
    page = taught.read("results/report/pages/index.html")
    assert '<section id="teacher">' in page and "same most likely token" in page
    scores = {
        model: json.loads(taught.read(f"results/eval/both/{model}/scores/scores.json"))["teachers"]["teacher"]
        for model in ("base-run", "sft-big", "sft-run")
    }
    assert scores["sft-big"]["agreement"] == 1.0 and scores["sft-big"]["kl"] < 1e-3
    assert scores["sft-run"]["kl"] < scores["base-run"]["kl"]
    # Weight and loss leave the teacher's pass alone; another k doesn't.
    assert taught.stale() == set()
    taught.config["sft"]["run"]["distill"] |= {"weight": 0.9, "loss": "jsd"}
    assert taught.stale() == {"sft", "eval", "card", "report"}
    taught.config["teacher"]["big"]["k"] = 4
    assert taught.stale() == {"teacher", "teacher_pass", "sft", "eval", "card", "report"}
