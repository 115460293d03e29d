"""A stage is one module, one rule file and a line: a toy, added to a copy of the workflow as CONTRIBUTING.md says, and run."""

import json
import os
import re
import subprocess
import sys

import pytest

from .conftest import ROOT
from .test_cluster import Cluster

pytestmark = pytest.mark.workflow
MANIFEST = "results/lengths/of-run/manifest.json"
MODULE = '''
"""The `lengths` stage: of each DPO model, how many bytes its files have."""

import json
import sys

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base import Model
from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.job import Job
from snaketune.stages.outcome import Outcome
from snaketune.stages.cache.work_folders import WorkFolder


class LengthsSpec(Model):
    """Which files are measured."""

    ending: str


def jobs(config, planned):
    """One for each DPO model."""
    for job in planned:
        if job.stage == "dpo":
            spec = LengthsSpec(ending=".safetensors")
            yield Job(stage="lengths", name=f"of-{job.name}", spec=spec, artifacts={"model": (job,)})


STAGE = Stage(
    module=__name__,
    spec=LengthsSpec,
    payload="lengths",
    inputs={"model": exactly_one("dpo")},
    cost=Cost(mb=1234, minutes=7),
    jobs=jobs,
)


def build(spec: LengthsSpec, work: WorkFolder, *, model: Artifact) -> Outcome:
    """Fill `work.payload` with `lengths.json`."""
    sizes = {path.name: path.stat().st_size for path in model.files() if path.name.endswith(spec.ending)}
    (work.payload / "lengths.json").write_text(json.dumps(sizes))
    return Outcome(counts={"files": len(sizes)})
'''


@pytest.fixture
def with_toy(own_code):
    """A finished project, whose code has a stage more."""
    code = own_code.code / "workflow"
    (code / "snaketune/publishing/lengths.py").write_text(MODULE.lstrip(), encoding="utf-8")
    rule = (ROOT / "workflow/rules/plan.smk").read_text(encoding="utf-8")
    table = code / "snaketune/stages/table.py"
    last = '    "report.report",\n'
    lines = table.read_text(encoding="utf-8").replace(last, f'    "publishing.lengths",\n{last}')
    table.write_text(lines, encoding="utf-8")
    (code / "rules/lengths.smk").write_text(re.sub(r"\bplan\b", "lengths", rule), encoding="utf-8")
    return own_code


def by_hand(project, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(project.code / "workflow")}
    command = [sys.executable, "-m", "snaketune", *arguments]
    return subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_stage_is_one_module_and_one_rule_file(with_toy):
    assert with_toy.stale() == set()
    assert with_toy.stale(MANIFEST) == {"lengths"}
    with_toy.snakemake(MANIFEST)
    manifest = json.loads(with_toy.read(MANIFEST))
    assert (manifest["stage"], manifest["counts"]) == ("lengths", {"files": 1})
    weights = with_toy.folder / "results/dpo/run/model/model.safetensors"
    assert manifest["payload"].keys() == {"lengths.json"}
    result = json.loads(with_toy.read("results/lengths/of-run/lengths/lengths.json"))
    assert result == {weights.name: weights.stat().st_size}
    assert "Nothing to be done" in with_toy.snakemake(MANIFEST)

    assert "lengths" in by_hand(with_toy, "--help").stdout
    said = by_hand(with_toy, "lengths", "results/.jobs/lengths/of-run.json").stdout
    assert "lengths: nothing to compute" in said

    path = with_toy.code / "workflow/snaketune/publishing/lengths.py"
    # Its cost shapes no result.
    path.write_text(path.read_text(encoding="utf-8").replace("minutes=7", "minutes=8"), encoding="utf-8")
    assert with_toy.stale(MANIFEST) == set()
    path.write_text(path.read_text(encoding="utf-8").replace('{"files"', '{"files_measured"'), encoding="utf-8")
    assert with_toy.stale() == set()
    assert with_toy.stale(MANIFEST) == {"lengths"}
    assert "lengths: made" in with_toy.snakemake(MANIFEST)
    assert json.loads(with_toy.read(MANIFEST))["counts"] == {"files_measured": 1}


@pytest.mark.slow
def test_it_requests_from_a_cluster_what_it_declares(with_toy, slurm, monkeypatch):
    requested = Cluster(with_toy, slurm, monkeypatch).requested(MANIFEST)
    assert requested.keys() == {"lengths"}
    # With what Snakemake itself takes around a job.
    assert {key: requested["lengths"][key] for key in ("threads", "mem_mb", "runtime")} == {
        "threads": "1",
        "mem_mb": "1800",
        "runtime": "7",
    }
