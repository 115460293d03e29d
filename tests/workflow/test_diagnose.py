"""`snakemake diagnose` on a real run: trials in turns, what they found, and that nothing else runs for them."""

import itertools
import json

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph

from .command_line import snakemake
from .conftest import Project

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def diagnosed(finished, tmp_path_factory) -> Project:
    project = finished.copy_to(tmp_path_factory.mktemp("diagnose") / "project")
    project.config["diagnose"] = {
        "speed": {
            "run": "sft:run",
            "changes": {"one-row": {"training.micro_batch_rows": 1}},
            "steps": 4,
            "warmup_steps": 1,
            "repeats": 1,
        }
    }
    return project


def test_trials_take_turns_and_a_table_shows_their_results(diagnosed):
    assert diagnosed.stale("diagnose") == {"trial", "diagnosis", "diagnose"}
    said = diagnosed.snakemake("diagnose")
    assert said.count("trial: made results/trial/speed/") == 2
    result = json.loads(diagnosed.read("results/diagnosis/speed/attribution/attribution.json"))
    baseline, one = result["rows"]
    assert baseline["tokens_per_second"]["median"] > 0 and baseline["gain_percent"]["median"] == 0
    # The same rows in the same order: the batch plan changes a loss in its last bits.
    assert one["loss"]["median"] == pytest.approx(baseline["loss"]["median"], rel=1e-4)
    measured = json.loads(diagnosed.read("results/trial/speed/one-row/1/measured/measured.json"))
    assert (measured["micro_batch_rows"], measured["accumulation"], measured["steps"]) == (1, 4, 5)
    assert set(measured["probe"]) == {"matmul_flops_per_second", "copy_bytes_per_second", "disk_bytes_per_second"}
    # Kept, and of no concern to anything else.
    assert diagnosed.stale("diagnose") == set()
    assert diagnosed.stale() == set()


def test_learning_rates_are_tested_in_one_more_trial(diagnosed):
    project = diagnosed
    project.config["diagnose"]["rates"] = {"run": "sft:run", "learning_rates": [1e-5, 1.0], "steps": 24}
    assert project.stale("diagnose") == {"trial", "diagnosis", "diagnose"}
    said = project.snakemake("diagnose")
    assert said.count("trial: made results/trial/rates/") == 1
    result = json.loads(project.read("results/diagnosis/rates/attribution/learning_rates.json"))
    rates = [one["learning_rate"] for one in result["tested"]]
    assert (rates[0], rates[-1], len(rates)) == (1e-5, pytest.approx(1.0), 24)
    assert rates[1] / rates[0] == pytest.approx(1e5 ** (1 / 23))
    assert 1e-5 < result["try"] < 1
    assert f"try training.learning_rate: {result['try']:.2g}" in said
    assert project.read("results/diagnosis/rates/attribution/learning_rates.svg").startswith("<?xml")
    assert not (project.folder / "results/diagnosis/rates/attribution/attribution.json").exists()
    del project.config["diagnose"]["rates"]


def test_trials_follow_each_other_round_by_round(diagnosed, monkeypatch):
    """So that what happens to the machine meanwhile happens to all variants, and none takes from another."""
    monkeypatch.chdir(diagnosed.folder)
    settings = diagnosed.config["diagnose"]["speed"] | {"repeats": 3, "run": "dpo:run"}
    graph = JobGraph(*load(diagnosed.config | {"diagnose": {"speed": settings}}))
    order = [f"speed/{variant}/{repeat}" for repeat in (1, 2, 3) for variant in ("baseline", "one-row")]
    for before, name in itertools.pairwise(order):
        assert [job.name for job in graph.job("trial", name).after if job.stage == "trial"] == [before]


def test_a_config_without_diagnoses_is_refused_with_the_missing_key(finished):
    status, said = snakemake(finished.arguments("--dry-run", "diagnose"), finished.folder)
    assert status and "the config has no `diagnose:`" in said
