"""With a varlen kernel, layers are compiled for the first batch and never recompiled, whatever the segments of later ones."""

import numpy as np
import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model
from benchmarks.gpu.rows import make_rows

from snaketune.config.lora import Lora
from snaketune.engine import dpo as dpo_trainer
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import IGNORED
from snaketune.engine.sft import SftTrainer
from snaketune.engine.throughput import LogCallback
from tests.models.conftest import VOCABULARY
from tests.training.pipeline_runs import spec, train
from tests.training.preference_runs import Trained

from .conftest import VARLEN

STEPS = 6


@pytest.fixture
def graphs(fresh, monkeypatch):
    """Count the graphs compiled by the end of each step; graphs are traced only, no code is generated."""
    compiled, counted, ended = torch.nn.Module.compile, [], LogCallback.on_step_end

    def compile_without_code(self, *arguments, **keywords):
        return compiled(self, *arguments, **keywords | {"backend": "aot_eager"})

    def on_step_end(self, *arguments, **keywords):
        ended(self, *arguments, **keywords)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_code)
    monkeypatch.setattr(LogCallback, "on_step_end", on_step_end)
    return counted


@pytest.fixture
def segments(monkeypatch):
    """Record the numbers of segments and gathered keys of each training batch."""
    counted = []
    for trainer in (SftTrainer, DpoTrainer):
        monkeypatch.setattr(trainer, "training_step", _noted(trainer.training_step, counted))
    return counted


def _noted(step, counted):
    def training_step(self, model, inputs, *others):
        given = inputs["segments"]
        counted.append((len(given.cu_q), None if given.keys_U is None else len(given.keys_U)))
        return step(self, model, inputs, *others)

    return training_step


@pytest.mark.parametrize(
    ("family", "lora", "checkpointing"),
    [
        pytest.param("llama", None, False, marks=pytest.mark.slow),
        pytest.param("llama", Lora(rank=2), False, marks=pytest.mark.slow),
        pytest.param("qwen2", None, True, marks=pytest.mark.slow),
        ("mistral", None, False),
    ],
)
def test_sft(tmp_path, calls, graphs, segments, family, lora, checkpointing):
    rows = make_rows(2 * STEPS, 64, VOCABULARY)
    # Some documents are longer than this window.
    window = {"sliding_window": 12} if family == "mistral" else {}
    config = tiny_config(family, initializer_range=0.05, **window)
    made = spec(lora, compile=True, epochs=1, batch_rows=2, gradient_checkpointing=checkpointing)
    train(tmp_path / "work", rows, made, lambda: tiny_model(config), compute=VARLEN, every=100)
    assert len(graphs) >= STEPS
    assert set(graphs) == {graphs[0]} and graphs[0] > 0
    # The kernel gets the batches' own segments, and these differ.
    assert len(set(segments)) > 2
    assert {count - 1 for count, _ in segments} <= {call["segments"] for call in calls}
    assert {call["longest"] for call in calls[-10:]} == {max(128, rows.longest[0])}
    if family == "mistral":
        assert calls[-1]["window"] == 11


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), Lora(rank=2)])
def test_dpo(tmp_path, calls, graphs, segments, lora):
    pairs = Trained(tmp_path, rows=12, family="qwen2", compute=VARLEN, frozen=bool(lora))
    settings = {"batch_rows": 2, "micro_batch_rows": 2, "epochs": 1}
    pairs.train("work", {"loss": "sigmoid"}, lora=lora, compile=True, **settings)
    assert len(graphs) == STEPS
    assert set(graphs) == {graphs[0]} and graphs[0] > 0
    assert len({keys for _, keys in segments}) > 2


def test_single_completions_some_without_a_shared_prompt(tmp_path, calls, graphs, segments, monkeypatch):
    """Batches without shared prompts gather keys too, so that layers are compiled once."""
    pairs = Trained(tmp_path, kind="unpaired", rows=12, family="qwen2", compute=VARLEN)
    row_of = PackedRows.__getitem__

    def apart(self, row):
        row_tensors = row_of(self, row)
        alone = {"prefix_lengths": np.zeros_like(row_tensors["prefix_lengths"])}
        labels = row_tensors["labels"].copy()
        labels[np.cumsum([0, *row_tensors["segment_lengths"][:-1]])] = IGNORED
        return row_tensors | alone | {"labels": labels} if row < 6 else row_tensors

    monkeypatch.setattr(PackedRows, "__getitem__", apart)
    # The reference pass used rows with shared prompts.
    monkeypatch.setattr(dpo_trainer, "check_policy_is_reference", lambda *_, **__: None)
    pairs.train("work", {"loss": "kto"}, compile=True, batch_rows=2, micro_batch_rows=1, epochs=2)
    assert set(graphs) == {graphs[0]} and graphs[0] > 0
    assert all(keys for _, keys in segments)
