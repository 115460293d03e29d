"""`report.compare` in the real workflow: what it reruns, when the report is stale, and what is refused before anything runs."""

import json
import shutil

import pytest

pytestmark = pytest.mark.workflow


def test_comparing_reruns_the_report_alone(project):
    results = project.folder / "results"
    fingerprint = json.loads(project.read("results/dpo/run/manifest.json"))["fingerprint"]
    # No job of this config, though a rule could make what is called so.
    shutil.copytree(results / "dpo/run", results / "dpo/old")
    project.config["report"] = {"compare": [fingerprint[:9], "results/dpo/old"]}
    assert project.stale() == {"report"}
    shutil.rmtree(results / "dpo/old")
    assert "report.compare: there is no folder 'results/dpo/old'" in project.snakemake("--dry-run", check=False)
    # Jobs that aren't part of the report continue.
    assert project.stale("results/eval/both/dpo-run/manifest.json") == set()


@pytest.mark.slow
def test_a_report_that_compares_is_stale_only_where_something_changed(project):
    results = project.folder / "results"
    fingerprint = json.loads(project.read("results/dpo/run/manifest.json"))["fingerprint"]
    before = project.folder.parent / "before/results"
    shutil.copytree(results / "sft", before / "sft")
    shutil.copytree(results / "dpo/run", results / "dpo/old")
    project.config["report"] = {"compare": [fingerprint[:9], "results/dpo/old", "../before/results/sft/run"]}
    project.snakemake()
    page = project.read("results/report/pages/compare.html")
    for label in (f"dpo:{fingerprint[:9]}", "dpo:old", "sft:../before/results/sft/run"):
        assert label.replace("dpo:old", "dpo:results/dpo/old") in page
    assert "exact match" in page
    assert json.loads(project.read("results/report/manifest.json"))["compared"][0]
    assert project.stale() == set()
    run = before / "sft/run/run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"seconds": 5432.0}))
    assert project.stale() == {"report"}
    del project.config["report"]
    assert project.stale() == {"report"}
