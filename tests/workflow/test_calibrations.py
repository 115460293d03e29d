"""When curves are measured, and that they never make a training run again."""

import json
import re

import pytest

pytestmark = pytest.mark.workflow


def test_auto_waits_for_a_curve_and_a_choice_by_hand_does_not(project):
    training = project.config["sft"]["run"]["training"]
    training |= {"learning_rate": 0.5}
    assert "calibrate" not in project.stale()
    training["micro_batch_rows"] = "auto"
    assert {"calibrate", "sft"} <= project.stale()


def test_a_training_that_is_there_needs_no_curve(project):
    project.config["sft"]["run"]["training"]["micro_batch_rows"] = "auto"
    project.config["dpo"]["run"]["training"]["gradient_checkpointing"] = True
    assert project.stale() == set()


def test_curves_of_all_trainings_are_a_target(project):
    assert project.stale("calibrations") == {"calibrate", "calibrations"}


@pytest.mark.slow
def test_curves_of_all_trainings_on_request(project):
    """Measured once; then shared by all that has the same size, and no reason for anything."""
    said = project.snakemake("calibrations")
    manifests = sorted(project.folder.glob("results/calibrate/*/manifest.json"))
    assert len(manifests) == 2
    for manifest in manifests:
        curve = json.loads((manifest.parent / "curve/curve.json").read_text())
        assert curve["trials"][0]["micro_batch_rows"] == 1
        assert curve["best"]["tokens_per_second"] == pytest.approx(
            max(one["tokens_per_second"] for one in curve["trials"]), rel=0.03
        )
        log = project.read(f"results/logs/calibrate/{manifest.parent.name}.log")
        assert re.search(r"best: micro-batches of \d rows?, [\d,]+ tokens/s on cpu", log), said
    assert project.stale() == set()
    assert project.stale("calibrations") == set()
    project.config["sft"]["run"]["training"] |= {"learning_rate": 0.1, "epochs": 5, "micro_batch_rows": "auto"}
    assert "calibrate" not in project.stale()
    # A curve that is gone is made where something has to run, and nowhere else.
    for manifest in manifests:
        manifest.unlink()
    assert "calibrate" in project.stale()
    project.config["sft"]["run"]["training"] |= {"learning_rate": 0.002, "epochs": 1}
    assert project.stale() == set()
