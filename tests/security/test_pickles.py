"""Pickles: in data, in Arrow's own types, in checkpoints. Nothing here reads any, whatever a file is called."""

import ast
import json
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors import SafetensorError
from safetensors.torch import save_file

from snaketune.config.corpus_sources import HubDataset
from snaketune.corpus.reading.sources import read_file, read_hub
from snaketune.corpus.rows import Malformed
from snaketune.engine.checkpoints import (
    COMPLETE,
    last_checkpoint,
    load_weights,
    save_weights,
)
from snaketune.engine.optimizer_states import load_optimizer, save_optimizer
from snaketune.engine.random_states import load_random_state, save_random_state
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table
from tests.workflow.conftest import ROOT

from .hostile import Bomb

PACKAGE = ROOT / "workflow/snaketune"
# Each call executes what it reads or is given; with the reason why it is harmless here.
UNSAFE = {
    "pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.load", "np.load", "numpy.load", "pd.read_pickle",
    "os.system", "os.popen", "eval", "exec", "compile", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "runpy",
    "tarfile", "zipfile", "shutil.unpack_archive", "importlib.reload", "Dataset.from_pandas", "load_from_disk",
}  # fmt: skip
HARMLESS = {
    ("config/task_files.py", "yaml.load"),  # with a loader that builds plain values alone
    (
        "corpus/reading/archives.py",
        "tarfile",
    ),  # members are read within the archive, and none is extracted to a file of its own
    ("corpus/reading/archives.py", "zipfile"),
    # The file of a user's own function, named in the config, in a process of its own.
    ("sampling/scorer.py", "runpy"),
}


def called(tree: ast.AST) -> set[str]:
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return imported | modules | calls


def test_the_package_calls_nothing_that_runs_what_it_reads():
    result = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        result |= {(path.relative_to(PACKAGE).as_posix(), name) for name in called(tree) & UNSAFE}
        shells = [
            node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle")
        ]
        assert not shells, path
    assert result == HARMLESS
    archives = ast.parse((PACKAGE / "corpus/reading/archives.py").read_text(encoding="utf-8"))
    assert not {call for call in called(archives) if call.endswith((".extract", ".extractall"))}


@pytest.mark.parametrize(
    "name",
    ["a.pkl", "a.jsonl", "a.json", "a.parquet", "a.arrow", "a.csv", "a.npy", "a.npz", "a.pt", "a.bin", "a.joblib"],
)
def test_a_pickle_is_no_data_whatever_it_is_called(tmp_path, mark, name):
    path = tmp_path / name
    if path.suffix in (".npy", ".npz"):
        with path.open("wb") as file:
            {".npy": np.save, ".npz": np.savez}[path.suffix](file, np.array([Bomb(mark.path)], dtype=object))
    elif path.suffix == ".pt":
        torch.save(Bomb(mark.path), path)
    else:
        path.write_bytes(mark.bomb())
    for plain in (False, True):
        try:
            rows = list(read_file(path, name, plain=plain))
        except SnaketuneError:
            continue
        # Lines that are quarantined, and texts of a corpus of texts.
        assert all(isinstance(row.value, Malformed) or plain for row in rows)


def of_a_hostile_type(bomb: bytes) -> pa.Table:
    """A column of a type that pyarrow once unpickled."""
    named = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bomb}
    text = pa.field("text", pa.string(), metadata=named)
    return pa.table(
        [pa.array(["a document"])], schema=pa.schema([text], metadata={b"pandas": bomb, b"huggingface": bomb})
    )


def test_types_of_arrow_that_were_once_unpickled_are_not(tmp_path, mark):
    table = of_a_hostile_type(mark.bomb())
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.arrow", "a.parquet"):
        (row,) = read_file(tmp_path / name, name)
        assert row.value == {"text": "a document"}
    assert read_table(tmp_path / "a.arrow").num_rows == 1


def test_no_dataset_of_the_hub_is_read_by_a_script_or_from_a_pickle(tmp_path, monkeypatch, mark):
    """Read as `datasets` would without the check of its id: from a folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for files in ({"script.py": mark.code().encode()}, {"data.pkl": mark.bomb()}, {"dataset_infos.json": mark.bomb()}):
        folder = tmp_path / "script"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        with pytest.raises(SnaketuneError, match="can't be loaded"):
            list(read_hub(HubDataset(path="./script", revision="main")))
        mark.check()


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a small model, and what it is loaded into."""
    folder = tmp_path / "checkpoint-1"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_weights(folder, model)
    save_optimizer(folder, optimizer, scheduler)
    save_random_state(folder / "random-0.safetensors")
    (folder / COMPLETE).touch()

    def loading():
        load_weights(folder, model)
        load_optimizer(folder, optimizer, scheduler)
        load_random_state(folder / "random-0.safetensors")

    return folder, loading


def test_checkpoints_hold_safetensors_and_json_alone(checkpoint):
    folder, loading = checkpoint
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json", ""}
    loading()
    assert last_checkpoint(folder.parent) == folder


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "optimizer.safetensors", "optimizer.json", "random-0.safetensors"]
)
def test_a_pickle_put_into_a_checkpoint_does_not_run(checkpoint, mark, name):
    folder, loading = checkpoint
    (folder / name).write_bytes(mark.bomb())
    with pytest.raises((SafetensorError, ValueError, SnaketuneError, OverflowError, KeyError)):
        loading()


def test_pickles_beside_a_checkpoint_are_not_read(checkpoint, mark):
    folder, loading = checkpoint
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "scaler.pt",
        "training_args.bin",
        "pytorch_model.bin",
    ):
        (folder / name).write_bytes(mark.bomb())
    # A folder of shards in the place of the file.
    (folder / "weights").mkdir()
    (folder / "weights/.metadata").write_bytes(mark.bomb())
    (folder / "weights/__0_0.distcp").write_bytes(mark.bomb())
    with pytest.raises(SnaketuneError):
        loading()
    (folder / "weights/.metadata").unlink()
    (folder / "weights/__0_0.distcp").unlink()
    (folder / "weights").rmdir()
    loading()


def test_numbers_of_random_states_are_numbers(tmp_path, mark):
    """They lie as JSON in a header, and a state that is none is refused by who takes it."""
    before = random.getstate()
    numbers = {"python": [3, ["__import__('os')"], None], "numpy": ["MT19937", 0, 0, 0.0]}
    save_file(
        {"torch": torch.zeros(8, dtype=torch.uint8), "numpy": torch.zeros(624, dtype=torch.int64)},
        tmp_path / "r",
        metadata={"numbers": json.dumps(numbers)},
    )
    with pytest.raises((TypeError, ValueError)):
        load_random_state(tmp_path / "r")
    random.setstate(before)


def test_a_finished_run_has_no_pickle_anywhere(finished):
    """Protocol 2 and later begin with the same byte, zip archives of torch's with theirs."""
    result = [path for path in (finished.folder / "results").rglob("*") if path.is_file()]
    assert result
    for path in result:
        with path.open("rb") as file:
            head = file.read(2)
        assert not (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05") and head != b"PK", path
        assert path.suffix not in (".pt", ".pth", ".bin", ".pkl", ".npy", ".joblib", ".distcp"), path
