"""Snapshots of a run are results of their own, from which the run resumes to the weights that it has without them.

`test_survival` has one snapshot of an SFT run at each push.
"""

import json

import pytest

pytestmark = pytest.mark.workflow

RESULTS = ("results/sft/run", "results/dpo/run")


@pytest.mark.slow
def test_runs_go_on_from_several_snapshots_which_are_evaluated_and_start_other_runs(finished, tmp_path):
    plain, project = (finished.copy_to(tmp_path / name) for name in ("plain", "project"))
    for one in (plain, project):
        one.cores = 2
        for section in ("sft", "dpo"):
            one.config[section]["run"]["training"] |= {"seed": 5, "epochs": 2}
    plain.snakemake(*(f"{result}/manifest.json" for result in RESULTS))

    project.config["sft"]["run"]["training"]["snapshots"] = [0.6, 0.3]
    project.config["dpo"]["run"]["training"]["snapshots"] = [0.5]
    # A run can start from a snapshot, whose reference pass is named after it.
    project.config["dpo"]["early"] = project.config["dpo"]["run"] | {"from": "run@0.6"}
    project.config["eval"]["both"] |= {"models": ["sft:run@0.3", "sft:run@0.6", "sft:run", "dpo:run@0.5"], "samples": 1}
    project.config["eval"]["both"]["generation"] = {"max_new_tokens": 1}
    del project.config["eval"]["both"]["exact_match"]
    project.snakemake()
    for result in RESULTS:
        whole, same = (json.loads(one.read(f"{result}/manifest.json")) for one in (project, plain))
        assert (whole["payload"], whole["counts"]) == (same["payload"], same["counts"])
        assert "resuming from" in project.read(f"{result.replace('results', 'results/logs')}.log")
    steps = [
        json.loads(project.read(f"results/sft/{name}/manifest.json"))["counts"]["steps"]
        for name in ("run@0.3", "run@0.6", "run")
    ]
    assert steps[0] < steps[1] < steps[2]
    # Each was trained once: a snapshot's process begins where the one before ended.
    run = json.loads(project.read("results/sft/run@0.6/run.json"))
    assert run["steps_of_this_process"] == steps[1] - steps[0]
    inputs = json.loads(project.read("results/dpo/early/manifest.json"))["inputs"]
    assert inputs["model"] != json.loads(project.read("results/dpo/run/manifest.json"))["inputs"]["model"]
    losses = [
        json.loads(project.read(f"results/eval/both/sft-{name}/scores/scores.json"))["conversations"]["chat"][
            "held_out_loss"
        ]
        for name in ("run@0.3", "run@0.6", "run")
    ]
    assert losses[0] > losses[2]
    assert "of sft:run</figcaption>" in project.read("results/report/pages/index.html")
    # Without the snapshots the run is what it was.
    del project.config["dpo"]["early"]
    for section in ("sft", "dpo"):
        del project.config[section]["run"]["training"]["snapshots"]
    project.config["eval"]["both"]["models"] = ["sft:run"]
    assert not project.stale() & {"sft", "dpo"}
