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
