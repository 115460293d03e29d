"""`python -m snaketune init`: a config that is complete, valid, and says why it chose what it chose."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from snaketune.__main__ import main
from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.preview import first_config as module
from snaketune.preview.first_config import first_config
from snaketune.stages.graph import JobGraph

ROOT = Path(__file__).resolve().parents[2]
CHAT, PAIRS = (str(ROOT / f"resources/demo/{name}.jsonl") for name in ("chat", "preferences"))


@pytest.fixture
def base(tmp_path, monkeypatch) -> str:
    """A model's folder with one matrix of a million weights, and no chat template."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resources").symlink_to(ROOT / "resources")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text("{}")
    save_file({"weight": np.zeros((1000, 1000), np.float16)}, folder / "model.safetensors")
    return "model"


@pytest.mark.parametrize(("memory", "rank", "rates"), [(24e9, None, (1e-5, 5e-7)), (20e6, 16, (1e-4, 5e-6))])
def test_lora_by_memory_and_learning_rates_with_it(base, monkeypatch, memory, rank, rates):
    monkeypatch.setattr(module, "memory_of_device", lambda: (memory, "a GPU here"))
    text = first_config([CHAT, PAIRS], base)
    config, _ = load(yaml.safe_load(text))
    assert JobGraph(config, {"sft": {}, "dpo": {}}).jobs
    sft, dpo = config.sft["tuned"], config.dpo["aligned"]
    assert [run.lora and run.lora.rank for run in (sft, dpo)] == [rank, rank]
    assert (sft.training.learning_rate, dpo.training.learning_rate) == rates
    assert "all weights of 1M parameters (by its files) take 0 GB and activations, a GPU here has" in text
    assert config.tokenizers["base"].chat_template == module.SHIPPED_TEMPLATE
    assert config.eval["scores"].models == ("base:tuned", "sft:tuned", "dpo:aligned")


def test_files_of_a_kind_are_one_corpus_each_read_as_previewed_and_rows_fit_the_length(base, tmp_path):
    long = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 1000}]}
    (tmp_path / "long.jsonl").write_text(f"{json.dumps(long)}\n" * 3)
    mapped = {"Frage": "Wie viel ist 2 und 3?", "Antwort": "5 natürlich, und das weiß jedes Kind."}
    (tmp_path / "german.jsonl").write_text(f"{json.dumps(mapped)}\n" * 3)
    config, _ = load(yaml.safe_load(first_config(["long.jsonl", "german.jsonl"], base)))
    first, second = config.corpora["chat"].sources
    assert (first.files, second.files) == (("long.jsonl",), ("german.jsonl",))
    assert (second.fields.prompt, second.fields.response) == ("Frage", "Antwort")
    assert config.sft["tuned"].packing.length == 2048
    assert not config.dpo


@pytest.mark.parametrize(
    ("files", "message"),
    [([PAIRS], "none of the files holds conversations or documents"), (["odd.jsonl"], "odd.jsonl: no layout")],
)
def test_files_that_no_training_can_start_from_are_refused(base, tmp_path, files, message):
    (tmp_path / "odd.jsonl").write_text('{"a": 1, "b": [2]}\n')
    with pytest.raises(SnaketuneError, match=message):
        first_config(files, base)


def test_the_command_writes_a_new_file_only(base, capsys):
    assert main(["init", CHAT, "--base", base]) == 0
    assert "snakemake -n --configfile mine.yaml" in capsys.readouterr().out
    assert main(["init", CHAT, "--base", base]) == 1
    assert "mine.yaml exists; name another file with --out" in capsys.readouterr().err
