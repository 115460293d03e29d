"""Merged models: the mean of weights, also of adapters, evaluated like trained ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from snaketune.config.load import load
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import result_at
from snaketune.training import merge

pytestmark = pytest.mark.workflow


SOUPS = {
    "soup": {"models": {"sft:run": 1, "dpo:run": 3}},
    "sphere": {"models": {"sft:run": 1, "dpo:run": 1}, "method": "slerp"},
}


def check(sft: dict, dpo: dict, soup: dict, sphere: dict) -> None:
    assert soup.keys() == sft.keys() == sphere.keys()
    for name in sft:
        torch.testing.assert_close(soup[name], 0.25 * sft[name] + 0.75 * dpo[name], rtol=0, atol=1e-6)
        # Between two weights of nearly the same direction and length, arc and chord are nearly the same.
        torch.testing.assert_close(sphere[name], (sft[name] + dpo[name]) / 2, rtol=1e-2, atol=1e-3)


def test_merged_weights_are_the_mean(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.folder)
    graph = JobGraph(*load(finished.config | {"merge": SOUPS}))
    models = [load_file(f"results/{name}/run/model/model.safetensors") for name in ("sft", "dpo")]
    for name in SOUPS:
        job, work = graph.job("merge", name), WorkFolder(tmp_path / name)
        work.start()
        merge.build(job.spec, work, models=[result_at(Path(one.manifest)) for one in job.artifacts["models"]])
        assert (work.payload / "tokenizer.json").is_file()
        models.append(load_file(work.payload / "model.safetensors"))
    check(*models)


@pytest.mark.slow
def test_merged_models_and_adapters_are_evaluated(finished, tmp_path):
    project = finished.copy_to(tmp_path / "project")
    project.cores = 2
    rows = {"corpus": "chat", "tokenizer": "small", "packing": {"length": 256}}
    learning = {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 0.01}
    lora = {"rank": 2, "merge": False}
    project.config["sft"] |= {
        "adapter": rows | {"use_base": "sft:run", "lora": lora, "training": learning},
        "merged": rows | {"use_base": "sft:run", "lora": {"rank": 2}, "training": learning},
    }
    project.config["merge"] = SOUPS | {
        "alone": {"models": {"sft:adapter": 1, "sft:run": 1}},
        "whole": {"models": {"sft:merged": 1, "sft:run": 1}},
    }
    del project.config["eval"]["both"]["exact_match"]
    project.config["eval"]["both"] |= {
        "models": ["sft:run", "merge:soup"],
        "generation": {"max_new_tokens": 1},
        "samples": 1,
    }
    project.snakemake()

    def weights(result):
        return load_file(project.folder / f"results/{result}/model/model.safetensors")

    check(*map(weights, ("sft/run", "dpo/run", "merge/soup", "merge/sphere")))
    # An adapter alone is applied to its base first.
    alone, whole = weights("merge/alone"), weights("merge/whole")
    assert all(torch.equal(alone[name], whole[name]) for name in whole)
    assert (project.folder / "results/merge/soup/model/tokenizer.json").is_file()
    scores = json.loads(project.read("results/eval/both/merge-soup/scores/scores.json"))
    assert scores["conversations"]["chat"]["held_out_loss"] > 0
    assert "merge:soup" in project.read("results/report/pages/index.html")


def test_models_that_dont_fit_together_are_refused(fresh):
    sft, other = fresh.config["sft"], {"train": {"corpora": ["chat"], "vocab_size": 350}}
    fresh.config["tokenizers"]["other"] = other
    sft["second"] = sft["run"] | {"tokenizer": "other"}
    fresh.config["merge"] = {"soup": {"models": {"sft:run": 1, "sft:second": 1}}}
    said = fresh.snakemake("--dry-run", check=False)
    assert "models with different tokenizers can't be merged: sft:run has small, sft:second has other" in said
    fresh.config["merge"] = {"soup": {"models": {"sft:run": 1, "sft:runn": 1}}}
    assert "merge.soup.models: there is no 'runn' under `sft:`; did you mean 'run'" in fresh.snakemake(
        "--dry-run", check=False
    )
    fresh.config["merge"] = {"soup": {"models": {"sft:run": 1}, "method": "slerp"}}
    said = fresh.snakemake("--dry-run", check=False)
    assert "merge.soup.models" in said and "at least 2" in said
