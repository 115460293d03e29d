"""`snakemake doctor` on a real run: timings in turns, what they found, and that nothing else runs for them."""

import itertools
import json

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph

from .command_line import snakemake
from .conftest import Project

pytestmark = pytest.mark.workflow


@pytest.fixture(scope="module")
def examined(finished, tmp_path_factory) -> Project:
    project = finished.copy_to(tmp_path_factory.mktemp("doctor") / "project")
    project.config["doctor"] = {
        "runs": ["sft:run"],
        "changes": {"one-row": {"training.micro_batch_rows": 1}},
        "steps": 4,
        "repeats": 1,
    }
    return project


def test_timings_take_turns_and_a_table_shows_their_results(examined):
    assert examined.stale("doctor") == {"calibrate", "timing", "bottleneck", "doctor"}
    said = examined.snakemake("doctor")
    assert said.count("timing: made results/timing/sft-run/") == 2
    result = json.loads(examined.read("results/bottleneck/sft-run/doctor/doctor.json"))
    assert result["now"]["tokens_per_second"]["median"] > 0 and result["now"]["gain_percent"]["median"] == 0
    assert result["now"]["mfu"] > 0 and result["now"]["expected_memory_gb"] > 0
    (row,) = [one for one in result["settings"] if one["setting"] == "one-row"]
    # The same rows in the same order: the batch plan changes a loss in its last bits.
    assert row["figures"]["loss"]["median"] == pytest.approx(result["now"]["loss"]["median"], rel=1e-4)
    assert sum(result["parts"].values()) == pytest.approx(1, abs=0.01) and result["parts"]["products"] > 0
    assert f"What limits it: {result['limit']}." in examined.read("results/bottleneck/sft-run/doctor/doctor.md")
    measured = json.loads(examined.read("results/timing/sft-run/one-row/1/measured/measured.json"))
    assert (measured["micro_batch_rows"], measured["accumulation"], measured["steps"]) == (1, 4, 5)
    assert set(measured["probe"]) == {"matmul_flops_per_second", "copy_bytes_per_second", "disk_bytes_per_second"}
    profiled = examined.folder / "results/timing/sft-run/baseline/1/measured"
    assert (profiled / "trace.json.gz").is_file()
    assert json.loads((profiled / "measured.json").read_text(encoding="utf-8"))["steps"] == 5 + 2
    # Kept, and of no concern to anything else.
    assert examined.stale("doctor") == set()
    assert examined.stale() == set()


def test_timings_follow_each_other_round_by_round(examined, monkeypatch):
    """So that what happens to the machine meanwhile happens to all variants, and none takes from another."""
    monkeypatch.chdir(examined.folder)
    graph = JobGraph(
        *load(examined.config | {"doctor": examined.config["doctor"] | {"repeats": 3, "runs": ["dpo:run"]}})
    )
    order = [f"dpo-run/{variant}/{repeat}" for repeat in (1, 2, 3) for variant in ("baseline", "one-row")]
    for before, name in itertools.pairwise(order):
        assert [job.name for job in graph.job("timing", name).after if job.stage == "timing"] == [before]


def test_a_config_without_trainings_is_refused_with_the_missing_key(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    project.config = {key: project.config[key] for key in ("corpora", "tokenizers")}
    project.write_config()
    status, said = snakemake(project.arguments("--dry-run", "doctor"), project.folder)
    assert status and "the config has no `sft:`" in said
