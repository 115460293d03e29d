"""`snakemake smoke` runs every stage apart from the real results."""

import json

import pytest

from snaketune.diagnostics.smoke import PROVES

pytestmark = [pytest.mark.workflow, pytest.mark.slow]


def test_every_stage_runs_below_results_smoke(project):
    before = set((project.folder / "results").rglob("manifest.json"))
    project.config["sft"]["run"]["base"]["hidden_size"] = 4096
    said = project.snakemake("smoke")
    assert PROVES[1] in said
    smoke = project.folder / "results/smoke/results"
    assert {path.parts[-3] for path in smoke.rglob("*/*/manifest.json")} >= {
        "corpus",
        "tokenizer",
        "sft",
        "dpo",
        "pack",
    }
    assert json.loads((smoke / "sft/run/manifest.json").read_text())["spec"]["base"]["hidden_size"] == 64
    assert (smoke / "report/pages/index.html").is_file()
    after = set((project.folder / "results").rglob("manifest.json"))
    assert {path for path in after if "smoke" not in path.parts} == before
