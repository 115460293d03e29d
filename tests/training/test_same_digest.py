"""Same seed, same digest: every kind of training writes the same files whatever was drawn before it."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.artifacts.tables import write_table
from snaketune.config.runs import Lora, Operation, Pretrained, Scratch, Training
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training import pipeline, sft_worker
from snaketune.training.trainer import Run
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import messages, train_in

from .test_pipeline import preference_training

ADAPTERS = {"full": None, "lora": Lora(rank=2, dropout=0.3)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("tokenizer")
    work, _ = train_in(folder, "bpe")
    return Artifact(folder / "manifest.json", {"payload": describe_files(work.payload), "records": {}}, work.payload)


ROWS = [{"id": str(i), "messages": messages(f"cat {i}?", f"ton {i}"), "tools": None} for i in range(12)]


def packed_rows(folder: Path, tokenizer: Artifact) -> Artifact:
    return chain.pack(folder, chain.corpus(folder / "corpus", "sft", ROWS, held_out=0), tokenizer, "sft", length=64)


def raw_rows(folder: Path) -> Artifact:
    """As the write stage has them with packing.strategy none."""
    (folder / "shards").mkdir(parents=True)
    table = pa.Table.from_pylist(ROWS).set_column(2, "tools", pa.nulls(len(ROWS), pa.string()))
    write_table(folder / "shards/train-00000.arrow", table)
    manifest = {"format_version": "2.0", "payload": describe_files(folder / "shards"), "records": {}}
    return Artifact(folder / "manifest.json", manifest, folder / "shards")


def sft_spec(folder: Path, lora: Lora | None) -> SftSpec:
    """From scratch, or with adapters on a base whose vocabulary lacks the tokenizer's tokens."""
    settings = Training(epochs=2, batch_rows=4, micro_batch_rows=2, learning_rate=0.01, seed=1)
    base: Pretrained | Scratch = Scratch(hidden_size=16, intermediate_size=16, layers=1, heads=2)
    if lora:
        tiny_model("llama").save_pretrained(folder / "base")
        base = Pretrained(path=str(folder / "base"))
    return SftSpec(base=base, training=settings, lora=lora, quantization=None)


def train(folder: Path, pack: Artifact, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    work = WorkFolder(folder / "work")
    work.start()
    run = Run(spec=sft_spec(folder, lora), operation=Operation(log_steps=1), work=work, compute=CPU)
    sft_worker.train_on(run, pack, tokenizer)
    return work


def packed_sft(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    return train(folder, packed_rows(folder, tokenizer), tokenizer, lora)


def raw_sft(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    return train(folder, raw_rows(folder), tokenizer, lora)


def packed_dpo(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    return preference_training(folder, lora)[1]


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", [packed_sft, raw_sft, packed_dpo])
def test_two_runs_write_the_same_files(tmp_path, tokenizer, kind, adapters, monkeypatch):
    train, seeds = pipeline.train, iter((1, 2))

    def train_after_others_drew(*arguments):
        torch.manual_seed(next(seeds))
        return train(*arguments)

    monkeypatch.setattr(pipeline, "train", train_after_others_drew)
    made = []
    for _ in range(2):
        # At one place: adapters name the model that they are of.
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        made.append(describe_files(kind(tmp_path / "run", tokenizer, ADAPTERS[adapters]).payload))
    assert made[0] == made[1]
    assert "model.safetensors" in made[0]
