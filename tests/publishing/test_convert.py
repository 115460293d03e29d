"""GGUF files: input of the converter, missing converters, and models that are refused."""

import json
import os
import sys
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import Artifact, describe_files, read_artifact, write_manifest
from snaketune.errors import SnaketuneError
from snaketune.publishing import convert
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import ConvertSpec

SPEC = ConvertSpec(type="q8_0")
# It writes its arguments and input files; the name of its folder has shell metacharacters.
STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path

folder, *options = sys.argv[1:]
assert options[0::2] == ["--outfile", "--outtype"], options
print("converting", folder)
if (Path(folder) / "fails").exists():
    sys.exit("no such architecture")
files = {{path.name: path.read_text() for path in Path(folder).iterdir()}}
about = {{"type": options[3], "files": files, "environment": dict(os.environ)}}
Path(options[1]).write_text(json.dumps(about))
"""
BYTE_LEVEL = {"model": {"type": "BPE", "byte_fallback": False}}
SENTENCEPIECE = {"model": {"type": "BPE", "byte_fallback": True}}
UNIGRAM = {"model": {"type": "Unigram"}}


def a_model(
    folder: Path, tokenizer: dict = BYTE_LEVEL, *, family: str = "llama", about: dict | None = None, **more: str
) -> Artifact:
    payload = folder / "sft/run/model"
    payload.mkdir(parents=True)
    files = {
        "config.json": json.dumps({"model_type": family}),
        "tokenizer.json": json.dumps(tokenizer),
        "model.safetensors": "w",
    }
    for name, content in (files | more).items():
        (payload / name).write_text(content)
    manifest = {"stage": "sft", "spec": {"trust_remote_code": False}, "payload": describe_files(payload), "records": {}}
    write_manifest(payload.parent / "manifest.json", manifest | (about or {}))
    return read_artifact(payload.parent / "manifest.json", "model")


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch) -> Path:
    """A folder with a stand-in for the converter, named as a user would."""
    folder = tmp_path / "llama $(touch x);.cpp"
    folder.mkdir()
    script = folder / "convert_hf_to_gguf.py"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    return folder


def converted(folder: Path, model: Artifact) -> dict:
    """Run the stage; return the input of the stand-in."""
    work = WorkFolder(folder / "work")
    work.start()
    convert.build(SPEC, work, model=model)
    return json.loads((work.payload / "model-q8_0.gguf").read_text())


def test_the_converter_gets_the_model_and_the_type(tmp_path, llama_cpp, capsys):
    model = a_model(tmp_path, **{"chat_template.jinja": "t"})
    given = converted(tmp_path, model)
    assert given["type"] == "q8_0"
    assert given["files"] == {path.name: path.read_text() for path in model.folder.iterdir()}
    assert "converting " in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


def test_it_gets_no_token_and_no_access_to_the_hub(tmp_path, llama_cpp, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hf_secret")
    environment = converted(tmp_path, a_model(tmp_path))["environment"]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["HF_HOME"].startswith(str(tmp_path))
    assert not {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"} & set(environment) and "PATH" in environment


def test_a_converter_on_path_is_executed_directly(tmp_path, llama_cpp, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", f"{llama_cpp}:{os.environ['PATH']}")
    assert converted(tmp_path, a_model(tmp_path))["type"] == "q8_0"


def test_a_missing_converter_is_reported_with_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SnaketuneError, match=r"git clone https://github.com/ggml-org/llama.cpp"):
        convert.find_converter()
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(SnaketuneError, match=r"LLAMA_CPP is .*, which has no convert_hf_to_gguf.py; set it"):
        convert.find_converter()


def test_the_error_has_its_last_output(tmp_path, llama_cpp):
    with pytest.raises(SnaketuneError, match=r"(?s)failed \(exit status 1\); its last output:.*no such architecture"):
        converted(tmp_path, a_model(tmp_path, fails=""))


def test_an_adapter_is_refused(tmp_path, llama_cpp):
    model = a_model(tmp_path, about={"base_dtype": "float32"})
    with pytest.raises(SnaketuneError, match=r"set lora.merge: true"):
        converted(tmp_path, model)


def test_untrusted_code_is_not_passed_to_the_converter(tmp_path, llama_cpp):
    with pytest.raises(SnaketuneError, match=r"modeling_x.py"):
        converted(tmp_path, a_model(tmp_path, **{"modeling_x.py": "raise SystemExit"}))


def test_a_tokenizer_that_was_trained_here_is_laid_out_without_prefix_space(tmp_path, llama_cpp):
    config = {"eos_token": "<|im_end|>"}
    more = {"sentencepiece.model": "pieces", "tokenizer_config.json": json.dumps(config)}
    model = a_model(tmp_path, SENTENCEPIECE, **more)
    files = converted(tmp_path, model)["files"]
    assert files["tokenizer.model"] == "pieces"
    assert json.loads(files["tokenizer_config.json"]) == config | {"add_prefix_space": False}
    # The trained model is unchanged.
    assert json.loads((model.folder / "tokenizer_config.json").read_text()) == config


@pytest.mark.parametrize(
    ("tokenizer", "family", "more", "message"),
    [
        (UNIGRAM, "llama", {"sentencepiece.model": ""}, "the tokenizer is Unigram"),
        (SENTENCEPIECE, "qwen2", {"sentencepiece.model": ""}, "for architecture qwen2"),
        (SENTENCEPIECE, "mistral", {}, "without its tokenizer.model"),
        (UNIGRAM, "mistral", {}, "without its tokenizer.model"),
    ],
)
def test_a_tokenizer_that_the_converter_would_change_is_refused(tmp_path, llama_cpp, tokenizer, family, more, message):
    with pytest.raises(SnaketuneError, match=message):
        converted(tmp_path, a_model(tmp_path, tokenizer, family=family, **more))


def test_a_damaged_model_is_not_converted(tmp_path):
    model = a_model(tmp_path)
    (model.folder / "model.safetensors").write_text("x")
    with pytest.raises(SnaketuneError, match="damaged"):
        convert.lay_out(model, tmp_path / "laid_out")
