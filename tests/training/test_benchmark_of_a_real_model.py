"""benchmarks.real_model: TRL, on the documents and adapters of a run of ours, has its losses."""

from dataclasses import replace

import pytest
from benchmarks import real_model

from snaketune.config.lora import Lora
from snaketune.training import pipeline
from snaketune.training.prepared_sft import prepare_sft
from tests.models.conftest import tiny_model

from .sft_runs import packed_rows, sft_run


def test_trl_has_the_losses_of_our_run(tmp_path, tokenizer, monkeypatch):
    run, rows = sft_run(tmp_path / "ours", Lora(rank=2)), packed_rows(tmp_path, tokenizer)
    # With a row for each token, as TRL adds none.
    tiny_model("llama", vocab_size=400).save_pretrained(run.spec.base.path)
    training = run.spec.training.model_copy(update={"epochs": 1.0, "batch_rows": 1})
    run = replace(
        run,
        spec=run.spec.model_copy(update={"training": training}),
        operation=run.operation.model_copy(update={"micro_batch_rows": 1}),
    )
    history = pipeline.train(prepare_sft(run, rows, tokenizer)).run["history"]
    ours = [entry["loss"] for entry in history if "loss" in entry]
    artifacts = {"pack": rows, "tokenizer": tokenizer}
    monkeypatch.setattr(real_model, "read_artifact", lambda path, payload: artifacts[path.name])
    job = {"spec": run.spec.model_dump(mode="json"), "inputs": {name: (name,) for name in artifacts}}
    adapters, config, settings, steps = real_model.prepared(job, tmp_path / "again")
    assert len(steps) == len(ours) > 2
    losses, _ = real_model.by_trl(run.spec.base.path, tokenizer.folder, adapters, config, settings, steps)
    assert losses == pytest.approx(ours, abs=1e-4)
    assert ours[-1] < ours[0]
