"""The requirements of the Snakemake workflow catalog: https://snakemake.github.io/snakemake-workflow-catalog"""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph
from snaketune.stages.table import STAGES

from .command_line import snakemake

ROOT = Path(__file__).parents[2]


def test_the_snakefile_is_where_the_catalog_expects_it():
    dry_run = ["-n", "--forceall", "--quiet", "rules"]
    plans = [snakemake([*where, *dry_run], ROOT)[1] for where in ([], ["-s", "workflow/Snakefile"])]
    jobs = [re.findall(r"^(\w+) +(\d+)$", plan, re.MULTILINE) for plan in plans]
    assert jobs[0] == jobs[1]
    default = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    # The batch plan is configured, so that nothing is measured.
    requested = {stage for stage, _ in JobGraph(*load(default)).jobs} - {
        "calibrate",
        "timing",
        "bottleneck",
        "verification",
        "reproduction",
    }
    assert {name for name, _ in jobs[0]} >= requested | {"all", "total"}


def test_the_catalogs_claims_about_deployment_are_true():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))["usage"]
    rules = [(ROOT / f"workflow/rules/{stage}.smk").read_text(encoding="utf-8") for stage in STAGES]
    assert usage["software-stack-deployment"]["conda"] == all("conda:" in rule for rule in rules)
    # One image for all rules, without conda in it.
    snakefile = (ROOT / "workflow/Snakefile").read_text(encoding="utf-8")
    assert usage["software-stack-deployment"]["apptainer"] == ("\ncontainer: " in snakefile)
    assert not usage["software-stack-deployment"]["apptainer+conda"]
    assert usage["software-stack-deployment"]["report"] == any("report(" in rule for rule in rules)
    assert not usage["mandatory-flags"]["flags"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    assert "snakemake" in readme
    assert "workflow" in readme


def test_the_lock_is_within_the_bounds_that_are_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (bounds,) = [one.specifier for one in map(Requirement, declared) if one.name == "snakemake"]
    (pinned,) = re.findall(r"^snakemake==(.*)$", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    (least,) = re.findall(
        r'^min_version\("(.*)"\)$', (ROOT / "workflow/Snakefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned in bounds
    assert {f">={least}"} == {str(bound) for bound in bounds if bound.operator == ">="}
    # The next major version may differ in anything.
    assert str(int(least.split(".")[0]) + 1) not in bounds


def test_ci_runs_the_projects_own_command():
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert ci["permissions"] == {"contents": "read"}
    commands = [step["run"] for job in ci["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run", "make test-all", "make upgrade-test"]
    assert (ROOT / ".ci/run").is_file() and "\nupgrade-test:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    actions = [step["uses"] for job in ci["jobs"].values() for step in job["steps"] if "uses" in step]
    # A tag may be moved, a commit can't.
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
