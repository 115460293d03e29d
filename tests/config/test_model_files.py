"""The files of a model's folder that count, links that lead out of it, and configs that name other files."""

import json

import pytest

from snaketune.config.model_files import check_model_files, model_files
from snaketune.errors import SnaketuneError

COUNTED = (
    "config.json", "model.safetensors", "tokenizer.model", "qwen.tiktoken", "merges.txt", "modeling_x.py", "no suffix",
    "additional_chat_templates/default.jinja", "versions/tokenizer.4.0.0.json", "custom_generate/generate.py",
)  # fmt: skip
OTHER = (
    "README.md", "LICENSE.txt", "License", "NOTICE", ".gitattributes", "logo.PNG", "pytorch_model.bin", "tf_model.h5", "x.gguf",
    "training_args.bin", "optimizer.pt", "pytorch_model.bin.index.json", "original/params.json", "original/tokenizer.model",
    "checkpoint-500/trainer_state.json", "w/v1.safetensors", ".cache/huggingface/x.json", "__pycache__/x.pyc",
)  # fmt: skip


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (*COUNTED, *OTHER):
        file = tmp_path / "base" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    (tmp_path / "elsewhere.json").write_text("{}")
    return tmp_path / "base"


def test_every_file_counts_but_those_that_no_library_loads(base):
    assert model_files("base") == tuple(sorted(f"base/{name}" for name in COUNTED))
    assert model_files("owner/name") == model_files(None) == ()
    check_model_files("base")


@pytest.mark.parametrize(
    ("link", "to", "refused"),
    [
        ("chat_template.jinja", "../elsewhere.json", True),
        ("sub", "original", True),
        ("sub", "..", True),
        ("chat_template.jinja", "merges.txt", False),
        ("chat_template.jinja", "nowhere", False),
        ("README.md", "../elsewhere.json", False),
    ],
)
def test_a_link_out_of_the_folder_is_refused(base, link, to, refused):
    (base / link).unlink(missing_ok=True)
    (base / link).symlink_to(to)
    if refused:
        with pytest.raises(SnaketuneError, match=rf"base/{link} is a link to /"):
            model_files("base")
    else:
        assert set(model_files("base")) >= {f"base/{name}" for name in COUNTED}


def test_a_snapshot_of_the_hub_is_links_to_its_blobs_alone(base, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/f00", tmp_path / "models--a--b/blobs"
    for folder in (snapshot / "additional_chat_templates", blobs):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "additional_chat_templates/x.jinja").symlink_to("../../../blobs/1")
    assert len(model_files(str(snapshot))) == 2
    (snapshot / "x.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(SnaketuneError, match="is a link to"):
        model_files(str(snapshot))


@pytest.mark.parametrize("key", ["transformers_weights", "a_key_of_tomorrow"])
@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ("pytorch_model.bin", True),
        ("w/v1.safetensors", True),
        ("original/params.json", True),
        ("../elsewhere.json", True),
        ("{tmp}/elsewhere.json", True),
        ("model.safetensors", False),
        ("versions/tokenizer.4.0.0.json", False),
        # Where a model came from is no file.
        ("{tmp}", False),
        ("../nowhere.json", False),
        ("a text " * 1000, False),
        ("", False),
    ],
)
def test_a_config_names_no_file_that_does_not_count(base, tmp_path, key, value, refused):
    config = {"text_config": {key: ["x", value.replace("{tmp}", str(tmp_path))]}}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(SnaketuneError, match=rf"tokenizer_config\.json: text_config\.{key} names '"):
            check_model_files("base")
    else:
        check_model_files("base")


def test_the_index_of_any_weights_names_its_neighbours_alone(base):
    (base / "w/v1.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../v1.safetensors"}}))
    with pytest.raises(SnaketuneError, match=r"v1\.safetensors\.index\.json names '\.\./"):
        check_model_files("base")


@pytest.mark.parametrize("path", [".", ".."])
def test_the_working_directory_is_no_model(base, path):
    with pytest.raises(SnaketuneError, match="a folder of its own"):
        model_files(path)
