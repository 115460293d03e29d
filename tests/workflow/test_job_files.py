"""Job files in whole runs: what Snakemake makes of their times, and what a run, a dry run and a cluster's job read."""

import base64
import json
import os
import re
import subprocess
import sys

import pytest

from snaketune.stages.host.locks import try_lock

from .conftest import ROOT, rules_in
from .reruns import DPO, SFT

pytestmark = pytest.mark.workflow


def test_the_same_damage_twice_is_mended_twice(project):
    """Snakemake leaves out a job whose inputs have the content of its last run, however new they are."""
    for _ in range(2):
        (project.folder / "results/dpo/run/model/config.json").unlink()
        # With the reasons, which the default profile leaves out.
        said = project.snakemake("results/dpo/run/manifest.json", "--quiet", "host")
        assert "dpo: nothing to compute" in said
        assert "Updated input files: results/.jobs/dpo/run.json" in said
        assert (project.folder / "results/dpo/run/model/config.json").is_file()


def test_a_dry_run_of_another_config_changes_nothing_that_a_run_reads(project):
    project.config["dpo"]["run"]["beta"] = 0.2
    # A run writes the files of all jobs, whatever its target.
    assert "Nothing to be done" in project.snakemake("results/sft/run/manifest.json")
    names = ("sft/run", "dpo/run", "eval/both/dpo-run")
    files = [project.folder / f"results/.jobs/{name}.json" for name in names]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    assert project.stale() == DPO
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.004
    assert project.stale() == SFT | {"preflight"}
    assert "0.004" in project.read("results/.jobs/.dry-run/sft/run.json")
    after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    assert after[0] == before[0]
    # Now stale for another reason as well, which changes what is said of it and nothing that the job reads.
    for (text, _), (now, _) in zip(before[1:], after[1:]):
        assert {**json.loads(text), "stale": 0, "planned": 0} == {**json.loads(now), "stale": 0, "planned": 0}


def test_a_second_run_is_refused_where_it_would_change_what_the_first_one_reads(project):
    project.stale()
    target = "results/corpus/pairs/manifest.json"
    with try_lock(project.folder / "results/.jobs/.lock"):
        assert "Nothing to be done" in project.snakemake(target, "--nolock")
        project.config["corpora"]["pairs"]["held_out"] = 0.4
        said = project.snakemake(target, "--nolock", check=False)
    # The first one that differs.
    assert "results/.jobs/corpus/pairs.json: another snakemake runs here, with another config or code" in said
    assert "corpus: " not in said
    assert "corpus: made" in project.snakemake(target)


def test_a_job_by_hand_is_one_short_command(project):
    project.config["corpora"]["chat"]["held_out"] = 0.4
    said = project.snakemake("--dry-run", "--printshellcmds", "results/corpus/chat/manifest.json")
    (words,) = re.findall(r"python (-m snaketune corpus \S+) 2>&1", said)
    command = [sys.executable, *words.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow")}
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.stale("results/corpus/chat/manifest.json") == set()
    done = subprocess.run(
        [*command[:3], "sft", command[4]], cwd=project.folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{command[4]} is a job file of stage corpus; run `python -m snaketune corpus` with it" in done.stderr


def test_a_job_that_waited_on_a_cluster_runs_as_it_was_planned(fresh):
    fresh.snakemake("--dry-run")
    planned = json.loads(fresh.read("results/.jobs/corpus/chat.json"))["spec"]
    fresh.config["corpora"]["chat"]["held_out"] = 0.4
    # The way a node starts a job that a scheduler sent.
    fresh.snakemake("--mode=remote", "--target-jobs", "corpus:name=chat", "--force", "--nolock", "--ignore-incomplete")
    assert json.loads(fresh.read("results/corpus/chat/manifest.json"))["spec"] == planned
    assert "corpus/chat: spec differs (held_out: 0.2 → 0.4)" in fresh.snakemake("--dry-run")


@pytest.mark.slow
def test_what_snakemake_leaves_out_is_named(project):
    """A training that it runs for a reason of its own, and an evaluation that is made of what is made of that."""
    project.config["eval"]["both"]["samples"] = 1
    name = base64.urlsafe_b64encode(b"results/sft/run/manifest.json").decode()
    marker = project.folder / ".snakemake/incomplete" / name
    marker.parent.mkdir(exist_ok=True)
    marker.write_text("{}", encoding="utf-8")
    said = project.snakemake("--rerun-incomplete")
    not_run = re.findall(r"^stale, and not run: (.*); run again$", said, re.MULTILINE)
    again = rules_in(project.snakemake())
    assert not_run and again, said
    assert project.stale() == set()
