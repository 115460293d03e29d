"""Rows that aren't packed, on TRL's trainer, through the same pipeline as packed ones."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from snaketune.artifacts.manifest import describe_files
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training import pipeline
from snaketune.training.prepared_sft import prepare_sft
from snaketune.training.trl_trainer import RawRows, RawTrainer
from tests.tokenization.small_tokenizers import messages

from .pipeline_runs import Interrupted, stop_after
from .sft_runs import ROWS, raw_rows, sft_run


def test_what_a_training_writes_and_logs(tmp_path, tokenizer, capsys):
    run = sft_run(tmp_path)
    outcome = pipeline.train(prepare_sft(run, raw_rows(tmp_path), tokenizer))
    assert "12 rows that aren't packed" in capsys.readouterr().out
    encoded = ChatTokenizer.load(tokenizer.folder).encode([row["messages"] for row in ROWS])
    tokens = 2 * sum(len(one.ids) for one in encoded)
    assert outcome.counts == {"rows": 12, "tokens": tokens, "steps": 6}
    assert outcome.about.keys() == {"trainer", "dtype", "saved_dtype", "compiled", "parameters", "trainable_parameters"}
    assert (outcome.about["trainer"], outcome.about["dtype"]) == ("trl", "float32")
    assert outcome.about["parameters"] == outcome.about["trainable_parameters"]
    assert outcome.run.keys() >= {"history", "device", "threads", "processes", "tokens_per_second_median"}
    written = sorted(path.name for path in run.work.payload.iterdir())
    assert written == ["config.json", "generation_config.json", "model.safetensors"]


def test_supervised_tokens_are_those_that_packed_rows_have(tmp_path, tokenizer, monkeypatch):
    datasets = []
    monkeypatch.setattr(RawTrainer, "train", lambda self, **_: datasets.append(self.train_dataset) or _stop())
    with pytest.raises(Interrupted):
        pipeline.train(prepare_sft(sft_run(tmp_path), raw_rows(tmp_path), tokenizer))
    *raw, blank = datasets[0].to_list()
    encoded = ChatTokenizer.load(tokenizer.folder).encode([row["messages"] for row in ROWS])
    for row, one in zip(raw, encoded, strict=True):
        assert row["input_ids"] == one.ids.tolist()
        assert [label != -100 for label in row["labels"]] == one.supervised.tolist()
    assert blank["labels"] == [-100]


def test_a_chat_template_that_trl_refuses_is_named_with_what_to_do(tmp_path, tokenizer):
    rows = raw_rows(tmp_path)
    shutil.copytree(tokenizer.folder, tmp_path / "tokenizer")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = tmp_path / "tokenizer" / name
        if path.is_file():
            path.chmod(0o644)
            path.write_text(path.read_text().replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""))
    described = tokenizer.manifest | {"payload": describe_files(tmp_path / "tokenizer")}
    unmarked = replace(tokenizer, manifest=described, folder=tmp_path / "tokenizer")
    with pytest.raises(SnaketuneError, match=r"TRL's trainer, which refuses .*; set tokenizers.NAME.chat_template to"):
        pipeline.train(prepare_sft(sft_run(tmp_path), rows, unmarked))


def _stop():
    raise Interrupted


@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.3)])
def test_a_resumed_training_ends_with_the_weights_of_an_undisturbed_one(tmp_path, tokenizer, monkeypatch, lora):
    pack, run = raw_rows(tmp_path), sft_run(tmp_path / "straight", lora)
    pipeline.train(prepare_sft(run, pack, tokenizer))
    straight = load_file(run.work.payload / "model.safetensors")
    run = sft_run(tmp_path / "resumed", lora)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            pipeline.train(prepare_sft(run, pack, tokenizer))
    pipeline.train(prepare_sft(run, pack, tokenizer))
    resumed = load_file(run.work.payload / "model.safetensors")
    assert straight.keys() == resumed.keys()
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]


def test_a_model_with_weights_that_are_not_finite_is_not_saved(tmp_path, tokenizer, monkeypatch):
    compute_loss = RawTrainer.compute_loss

    def explodes_at_the_last_step(self, *arguments, **keywords):
        loss = compute_loss(self, *arguments, **keywords)
        return loss * math.nan if self.state.global_step == self.state.max_steps - 1 else loss

    monkeypatch.setattr(RawTrainer, "compute_loss", explodes_at_the_last_step)
    run = sft_run(tmp_path)
    with pytest.raises(SnaketuneError, match=r"the training diverged and nothing of it is published"):
        pipeline.train(prepare_sft(run, raw_rows(tmp_path), tokenizer))
    assert not list(run.work.payload.iterdir())


def test_no_rows_or_an_unknown_format_are_refused(tmp_path, tokenizer):
    with pytest.raises(SnaketuneError, match="no row to train on"):
        pipeline.train(prepare_sft(sft_run(tmp_path), raw_rows(tmp_path / "none", rows=0), tokenizer))
    with pytest.raises(SnaketuneError, match=r"format_version '1.0'; expected '2.0' or '3.0'"):
        pipeline.train(prepare_sft(sft_run(tmp_path), raw_rows(tmp_path / "old", version="1.0"), tokenizer))


def test_tool_calls_that_the_template_renders_differently_are_refused(tmp_path, tokenizer, monkeypatch):
    called = messages("cat?", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    monkeypatch.setattr("tests.training.sft_runs.ROWS", [*ROWS, {"id": "c", "messages": called, "tools": None}])
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer.folder, folder)
    template = (folder / "chat_template.jinja").read_text()
    reading = "{% for m in messages if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + reading)
    with pytest.raises(SnaketuneError, match=r"packing.strategy none: .*1 of 13 rows.*tool calls.*best-fit-decreasing"):
        RawRows(raw_rows(tmp_path / "rows", rows=13), folder)
    assert len(RawRows(raw_rows(tmp_path / "others"), folder)) == 12
    assert len(RawRows(raw_rows(tmp_path / "as-text", rows=13), tokenizer.folder)) == 13


def test_optimizer_and_schedule_are_those_of_the_config(tmp_path, tokenizer):
    run = sft_run(tmp_path)
    settings = {"optimizer": "adafactor", "schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.5}}
    training = Training.model_validate(run.spec.training.model_dump() | settings)
    run = replace(run, spec=run.spec.model_copy(update={"training": training}))
    history = pipeline.train(prepare_sft(run, raw_rows(tmp_path), tokenizer)).run["history"]
    assert min(entry["learning_rate"] for entry in history[1:]) > 0.5 * training.learning_rate
    saved = json.loads((run.checkpoints / "checkpoint-6/optimizer.json").read_text())
    assert "clip_threshold" in saved["groups"][0]
