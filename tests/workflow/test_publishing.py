"""Publishing of whole runs: cards, pushes to a fake Hub, GGUF files, and resources/serve."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from snaketune.artifacts.manifest import read_artifact
from snaketune.publishing import convert
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import ConvertSpec
from tests.publishing.hub import TOKEN, running
from tests.publishing.test_convert import STAND_IN

from .conftest import ROOT

pytestmark = pytest.mark.workflow
# Drawn weights, so strong that the adapter changes the base model's answers.
LOUD = LoraConfig(r=4, lora_alpha=400, target_modules="all-linear", init_lora_weights=False)
PUSH = {"run": {"model": "dpo:run", "repository": "owner/name"}}


def run_module(name: str, beside: Path, *arguments: str) -> str:
    """Run a module that is in the folder `beside`."""
    command, variables = [sys.executable, "-m", name, *arguments], os.environ | {"PYTHONPATH": str(beside)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def code_of(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return code


def test_each_trained_model_has_a_card_by_which_it_can_be_loaded(finished, monkeypatch):
    model = finished.folder / "results/dpo/run/model"
    card = finished.read("results/card/dpo-run/card/README.md")
    assert ModelCard(card).data.tags == ["snaketune", "dpo", "sft"]
    assert "trained by supervised fine-tuning, then" in card
    assert "preference" not in finished.read("results/card/sft-run/card/README.md").split("## ")[0].split("---")[-1]
    scores = json.loads(finished.read("results/eval/both/dpo-run/scores/scores.json"))
    assert f"{scores['conversations']['chat']['held_out_loss']:.4g}" in card
    monkeypatch.chdir(model)
    exec(code_of(card), {})


def test_words_about_a_corpus_rerun_its_cards_alone(project):
    project.config["corpora"]["pairs"]["license"] = "cc0-1.0"
    table = project.snakemake("--dry-run")
    assert re.search(r"^card +1$", table, re.MULTILINE), table
    project.snakemake("results/card/dpo-run/manifest.json")
    assert "License: cc0-1.0." in project.read("results/card/dpo-run/card/README.md")
    assert project.stale() == set()


def test_a_push_is_its_own_target_and_sends_what_is_described(project, monkeypatch):
    assert "the config has no `push:`" in project.snakemake("push", check=False)
    project.config["push"] = PUSH
    assert project.stale() == set()
    assert project.stale("push") == {"push"}
    with running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HOME", str(project.folder / "hf"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        said = project.snakemake("push", "--printshellcmds")
        files = hub.repositories["owner/name"].branches["main"]
    model = json.loads(project.read("results/dpo/run/manifest.json"))["payload"]
    assert set(files) == {*model, "README.md", "ro-crate-metadata.json"}
    for folder in (said, *(path.read_text() for path in project.folder.glob("results/logs/*.log"))):
        assert TOKEN not in folder


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    # The fake converter doesn't follow links to other files, which it takes for text.
    reads_text = STAND_IN.replace("path.read_text()", "path.stat().st_size")
    (folder / "convert_hf_to_gguf.py").write_text(reads_text.format(python=sys.executable))
    monkeypatch.setenv("LLAMA_CPP", str(folder))


def test_a_gguf_file_is_its_own_target(project, llama_cpp, monkeypatch):
    project.config["gguf"] = {"small": {"model": "dpo:run", "type": "q8_0"}}
    assert project.stale() == set()
    project.snakemake("gguf")
    given = json.loads(project.read("results/convert/small/gguf/model-q8_0.gguf"))
    assert given["type"] == "q8_0"
    assert {"tokenizer.model", "model.safetensors"} <= set(given["files"])
    assert project.stale("gguf") == set()
    monkeypatch.setenv("LLAMA_CPP", "elsewhere")
    # Existing results aren't made again.
    assert "Nothing to be done" in project.snakemake("gguf")
    project.config["gguf"]["small"]["type"] = "f16"
    assert "LLAMA_CPP is 'elsewhere', which has no convert_hf_to_gguf.py" in project.snakemake("gguf", check=False)


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no folder of llama.cpp")
def test_llama_cpps_own_converter_writes_the_tokenizer_that_was_trained(finished, tmp_path, monkeypatch):
    folder = finished.folder / "results/sft/run"
    work = WorkFolder(tmp_path / "work")
    work.start()
    convert.build(ConvertSpec(type="f16"), work, model=read_artifact(folder / "manifest.json", "model"))
    monkeypatch.syspath_prepend(f"{os.environ['LLAMA_CPP']}/gguf-py")
    from gguf import GGUFReader

    said = {name: field.contents() for name, field in GGUFReader(work.payload / "model-f16.gguf").fields.items()}
    parts = json.loads((folder / "model/tokenizer.json").read_text())["model"]["vocab"]
    tokens = dict(zip(said["tokenizer.ggml.tokens"], range(len(parts))))
    assert {token.replace("▁", " "): at for token, at in tokens.items()} == parts
    assert said["tokenizer.ggml.model"] == "llama"
    assert said["tokenizer.ggml.add_space_prefix"] is False


def ask(*arguments: str) -> str:
    return run_module("chat", ROOT / "resources/serve", *arguments, "--tokens", "5")


@pytest.mark.slow
def test_the_example_answers_with_an_adapter_and_without(finished, tmp_path):
    model = finished.folder / "results/sft/run/model"
    plain = ask(str(model), "Add 2 and 3.")
    assert plain.strip()
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LOUD)
    alone = tmp_path / "alone"
    adapted.save_pretrained(alone / "adapter")
    for path in model.glob("*"):
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, alone)
    assert ask(str(alone), "Add 2 and 3.") != plain
