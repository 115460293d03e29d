"""Same seed, same digest: every kind of training writes the same files whatever random numbers were drawn before."""

import shutil
from pathlib import Path

import pytest
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.lora import Lora
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.training import pipeline
from snaketune.training.prepared_sft import prepare_sft

from .sft_runs import packed_rows, raw_rows, sft_run
from .test_pipeline import preference_training

ADAPTERS = {"full": None, "lora": Lora(rank=2, dropout=0.3)}


def packed_sft(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    run = sft_run(folder, lora)
    pipeline.train(prepare_sft(run, packed_rows(folder, tokenizer), tokenizer))
    return run.work


def raw_sft(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    run = sft_run(folder, lora)
    pipeline.train(prepare_sft(run, raw_rows(folder), tokenizer))
    return run.work


def packed_dpo(folder: Path, tokenizer: Artifact, lora: Lora | None) -> WorkFolder:
    return preference_training(folder, lora)[1]


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("kind", [packed_sft, raw_sft, packed_dpo])
def test_two_runs_write_the_same_files(tmp_path, tokenizer, kind, adapters, monkeypatch):
    train, seeds = pipeline.train, iter((1, 2))

    def train_after_others_drew(*arguments, **keywords):
        torch.manual_seed(next(seeds))
        return train(*arguments, **keywords)

    monkeypatch.setattr(pipeline, "train", train_after_others_drew)
    made = []
    for _ in range(2):
        # In one folder, since adapters name the path of their base.
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        made.append(describe_files(kind(tmp_path / "run", tokenizer, ADAPTERS[adapters]).payload))
    assert made[0] == made[1]
    assert "model.safetensors" in made[0]
