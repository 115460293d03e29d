"""What the Snakemake workflow catalog asks of a repository: https://snakemake.github.io/snakemake-workflow-catalog"""

import re
import subprocess
from pathlib import Path

import yaml

from snaketune.config.load import load
from snaketune.stages.graph import JobGraph
from snaketune.stages.table import STAGES

ROOT = Path(__file__).parents[2]


def test_the_map_is_found_where_the_catalog_looks_for_it():
    plans = [
        subprocess.run(
            ["snakemake", *where, "-n", "--forceall", "--quiet", "rules"], cwd=ROOT, capture_output=True, text=True
        )
        for where in ([], ["-s", "workflow/Snakefile"])
    ]
    jobs = [re.findall(r"^(\w+) +(\d+)$", plan.stdout + plan.stderr, re.MULTILINE) for plan in plans]
    assert jobs[0] == jobs[1]
    default = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    # Its portions are chosen by hand, so that nothing is measured.
    asked = {stage for stage, _ in JobGraph(*load(default)).jobs} - {"calibrate", "trial", "audit"}
    assert {name for name, _ in jobs[0]} >= asked | {"all", "total"}


def test_what_its_file_says_of_deployment_is_so():
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
