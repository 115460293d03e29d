"""A run that overfits on purpose: its held-out curve turns, its best weights beat its last ones, `stop_if` saves the rest."""

import json

import pytest

pytestmark = pytest.mark.workflow


@pytest.mark.slow
def test_the_best_weights_beat_the_last_ones_and_stopping_saves_steps(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    project.cores = 2
    sft = project.config["sft"]
    few = {"kind": "conversations", "sources": [{"files": ["data/chat.jsonl"], "max_rows": 24}], "held_out": 0.5}
    project.config["corpora"]["few"] = few
    learning = {"epochs": 24, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 0.01, "schedule": "constant"}
    learning |= {"evaluate": {"every": 0.125, "rows": 64, "samples": 1}}
    last = sft["run"] | {"corpus": "few", "packing": {"length": 128}, "training": learning}
    sft |= {
        "last": last,
        "best": last | {"training": learning | {"keep": "best"}},
        "stopped": last | {"training": learning | {"keep": "best", "stop_if": {"held_out_rises": 2}}},
    }
    models = [f"sft:{name}" for name in ("last", "best", "stopped")]
    project.config["eval"] = {
        "few": {"models": models, "conversations": ["few"], "packing": {"length": 128}, "samples": 1}
    }
    project.config["eval"]["few"]["generation"] = {"max_new_tokens": 1}
    project.snakemake()

    runs = {name: json.loads(project.read(f"results/sft/{name}/run.json")) for name in ("last", "best", "stopped")}
    curve = [point["loss"] for point in runs["last"]["held_out"]["points"]]
    assert min(curve) < curve[-1] - 0.05
    # Which weights are kept changes nothing about the training.
    assert curve == [point["loss"] for point in runs["best"]["held_out"]["points"]]
    scores = {name: json.loads(project.read(f"results/eval/few/sft-{name}/scores/scores.json")) for name in runs}
    losses = {name: score["conversations"]["few"]["held_out_loss"] for name, score in scores.items()}
    assert losses["best"] == pytest.approx(min(curve), abs=1e-4)
    assert losses["last"] == pytest.approx(curve[-1], abs=1e-4)
    manifests = {name: json.loads(project.read(f"results/sft/{name}/manifest.json")) for name in runs}
    assert manifests["stopped"]["kept"] == manifests["best"]["kept"] and losses["stopped"] == losses["best"]
    assert manifests["stopped"]["counts"]["steps"] < manifests["last"]["counts"]["steps"]
    page = project.read("results/report/pages/index.html")
    assert "held out: dotted" in page
    assert "While training" in project.read("results/report/pages/samples.html")
