"""`snakemake doctor` on a real run: timings in turns, what they found, and that nothing else runs for them."""

import itertools
import json
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.load import load
from snaketune.diagnostics import bottleneck, timed_training, timing
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import result_at
from snaketune.stages.loaded_job import read_job
from snaketune.training.autotune.batch_plan import CURVE
from snaketune.training.launch import processes
from tests.diagnostics.test_bottleneck import CURVE as INVENTED_CURVE
from tests.packing import chain

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


def check(result: dict, timings: dict[str, Path], table: str) -> None:
    """What doctor says, and what was measured."""
    assert result["now"]["tokens_per_second"]["median"] > 0 and result["now"]["gain_percent"]["median"] == 0
    assert result["now"]["mfu"] > 0 and result["now"]["expected_memory_gb"] > 0
    (row,) = [one for one in result["settings"] if one["setting"] == "one-row"]
    # The same rows in the same order: the batch plan changes a loss in its last bits.
    assert row["figures"]["loss"]["median"] == pytest.approx(result["now"]["loss"]["median"], rel=1e-4)
    assert sum(result["parts"].values()) == pytest.approx(1, abs=0.01) and result["parts"]["products"] > 0
    assert f"What limits it: {result['limit']}." in table
    measured = json.loads((timings["one-row"] / "measured.json").read_text(encoding="utf-8"))
    assert (measured["micro_batch_rows"], measured["accumulation"], measured["steps"]) == (1, 4, 5)
    assert set(measured["probe"]) == {"matmul_flops_per_second", "copy_bytes_per_second", "disk_bytes_per_second"}
    assert (timings["baseline"] / "trace.json.gz").is_file()
    assert json.loads((timings["baseline"] / "measured.json").read_text(encoding="utf-8"))["steps"] == 5 + 2


def test_timings_are_planned_and_a_table_shows_their_results(examined, tmp_path, monkeypatch):
    assert examined.stale("doctor") == {"calibrate", "timing", "bottleneck", "doctor"}
    monkeypatch.chdir(examined.folder)
    # In this process, not in one that it starts.
    monkeypatch.setattr(processes, "launch", lambda job, work: timed_training.build(
        job.spec, work, operation=job.operation, **job.arguments))  # fmt: skip
    works = {name: WorkFolder(tmp_path / name) for name in ("baseline", "one-row", "table")}

    def timed(variant: str) -> Artifact:
        # A dry run writes a file of its own for a job that is planned differently without `doctor:`.
        job = read_job(min(Path("results/.jobs").glob(f"**/timing/sft-run/{variant}/1.json")))
        work = works[variant]
        work.start()
        outcome = timing.launch(job, work)
        return chain.made(work.folder, outcome, job.spec)

    timings = [timed(variant) for variant in ("baseline", "one-row")]
    (tmp_path / "curve").mkdir()
    write_json(tmp_path / "curve" / CURVE, INVENTED_CURVE)
    curve = Artifact(
        tmp_path / "curve.json", {"payload": describe_files(tmp_path / "curve"), "records": {}}, tmp_path / "curve"
    )
    (pack,) = examined.folder.glob("results/pack/chat-*/manifest.json")
    found = {"pack": result_at(pack), "preflight": result_at(Path("results/preflight/run/manifest.json"))}
    works["table"].start()
    spec = JobGraph(*load(examined.config)).job("bottleneck", "sft-run").spec
    bottleneck.build(spec, works["table"], **found, calibrate=curve, timings=timings)
    folders = {name: work.payload for name, work in works.items()}
    check(
        json.loads((folders["table"] / "doctor.json").read_text()),
        folders,
        (folders["table"] / "doctor.md").read_text(),
    )


@pytest.mark.slow
def test_timings_take_turns_and_concern_nothing_else(examined):
    said = examined.snakemake("doctor")
    assert said.count("timing: made results/timing/sft-run/") == 2
    folders = {name: examined.folder / f"results/timing/sft-run/{name}/1/measured" for name in ("baseline", "one-row")}
    result, table = (examined.read(f"results/bottleneck/sft-run/doctor/doctor.{end}") for end in ("json", "md"))
    check(json.loads(result), folders, table)
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
