"""A model's files count by what libraries read: JSON by its value, weights by their tensors, however they are split."""

import json
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from snaketune.artifacts.model_digests import INDEX, WEIGHTS
from snaketune.config.model_files import model_files
from snaketune.stages.cache import fingerprint
from snaketune.stages.cache.fingerprint import cached_entries

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(4, dtype=np.int8),
    "c": np.ones(0, np.float16),
}
FORMAT = {"format": "pt"}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    save_file(TENSORS, tmp_path / "base" / WEIGHTS, FORMAT)
    for name, value in (
        ("config.json", {"size": 1, "x": "é"}),
        ("tokenizer_config.json", {"extra": {"p": "1", "q": "2"}}),
    ):
        write(tmp_path / "base" / name, value)
    return tmp_path / "base"


def write(path, value, **form) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, **form))


def entries(base) -> list[str]:
    files = model_files(str(base))
    return [entry for _, entry in cached_entries("base", [base / file for file in files], base.parent / "work")]


def split(base, files: dict[str, list[str]], mapped: dict[str, list[str]] | None = None, metadata=FORMAT) -> None:
    """Put the weights into these files. Args: mapped: the names that the index has, if it isn't right."""
    tensors = load_file(base / WEIGHTS)
    (base / WEIGHTS).unlink()
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, base / file, metadata)
    weight_map = {name: file for file, names in (mapped or files).items() for name in names}
    write(base / INDEX, {"metadata": {"total_size": len(files)}, "weight_map": weight_map})


TWO = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b", "c"]}


@pytest.mark.parametrize(
    "change",
    [
        lambda base: (base / "LICENSE.txt").write_text("mine"),
        lambda base: write(base / "config.json", {"size": 1, "x": "é"}, indent=4, ensure_ascii=False),
        lambda base: save_file(dict(reversed(TENSORS.items())), base / WEIGHTS, FORMAT),
        lambda base: split(base, {WEIGHTS: ["a", "b", "c"]}),
        lambda base: split(base, TWO),
        lambda base: split(base, {"x.safetensors": ["c", "a"], "y.safetensors": ["b"]}),
    ],
)
def test_another_form_of_the_same_model_changes_nothing(base, change):
    before = entries(base)
    change(base)
    assert entries(base) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda base: write(base / "config.json", {"size": 1.0, "x": "é"}),
        # New special tokens get their ids in this order.
        lambda base: write(base / "tokenizer_config.json", {"extra": {"q": "2", "p": "1"}}),
        lambda base: (base / "config.json").rename(base / "config.4.json"),
        lambda base: write(base / "additional_chat_templates/default.jinja", "x"),
        lambda base: write(base / "unknown", "x"),
        lambda base: save_file(TENSORS, base / WEIGHTS, {"format": "mlx"}),
        lambda base: save_file(TENSORS | {"a": TENSORS["a"][::-1].copy()}, base / WEIGHTS, FORMAT),
        lambda base: save_file(TENSORS | {"a": TENSORS["a"].view(np.uint8)}, base / WEIGHTS, FORMAT),
        lambda base: save_file(TENSORS | {"b": TENSORS["b"].reshape(3, 2)}, base / WEIGHTS, FORMAT),
        lambda base: save_file({"A" if name == "a" else name: t for name, t in TENSORS.items()}, base / WEIGHTS, FORMAT),
        lambda base: save_file({name: TENSORS[name] for name in "ab"}, base / WEIGHTS, FORMAT),
        lambda base: (base / WEIGHTS).write_bytes((base / WEIGHTS).read_bytes() + b"x"),
        lambda base: (base / WEIGHTS).write_bytes((base / WEIGHTS).read_bytes()[:-1]),
        lambda base: (base / WEIGHTS).write_bytes(b"no tensors"),
        # Which of these a library reads isn't said by the tensors.
        lambda base: split(base, TWO, {"model-1.safetensors": ["a", "c"], "model-2.safetensors": ["b"]}),
        lambda base: split(base, TWO, {"model-1.safetensors": ["a"]}),
        lambda base: split(base, TWO, {"model-1.safetensors": ["a"], "model-3.safetensors": ["b", "c"]}),
        lambda base: split(base, {WEIGHTS: ["a"], "model-2.safetensors": ["b", "c"]}),
        lambda base: split(base, TWO, metadata={"format": "mlx"}),
    ],
)  # fmt: skip
def test_another_model_is_another(base, change):
    before = entries(base)
    change(base)
    assert entries(base) != before


def test_tensors_that_two_shards_hold_count_by_the_shard(base):
    files = {"model-1.safetensors": TENSORS, "model-2.safetensors": TENSORS | {"a": TENSORS["a"] + 1}}
    (base / WEIGHTS).unlink()
    write(
        base / INDEX,
        {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}},
    )
    seen = []
    for names in (list(files), list(reversed(files))):
        for name, tensors in zip(names, files.values()):
            save_file(tensors, base / name, FORMAT)
        seen.append(entries(base))
    assert seen[0] != seen[1]


def test_weights_are_read_once_however_often_jobs_are_planned(base, monkeypatch):
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "TICK_NS", 0)
    split(base, TWO)
    time.sleep(0.01)
    read, digest = [], fingerprint.digest_model_file
    monkeypatch.setattr(fingerprint, "digest_model_file", lambda path: read.append(path.name) or digest(path))
    assert entries(base) == entries(base)
    assert sorted(read) == sorted(["config.json", "tokenizer_config.json", INDEX, *TWO])
