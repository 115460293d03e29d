"""Whole packed trainings of tiny models in this process (as a program: in several), without a workflow around."""

import multiprocessing
import os
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.runs import Lora, Scratch, Training
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import row_batch, schema
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training import checkpoints, pipeline
from snaketune.training.sft import SftTrainer
from snaketune.training.trainer import Run
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.training.executed import executed

LENGTH = 32
FORKED = multiprocessing.get_context("fork")


class Interrupted(BaseException):
    """As if the process had been killed."""


def pack(folder: Path, rows: int = 22, supervised: Any = None) -> PackedRows:
    """Rows of two documents each, and four free tokens.

    Args:
        supervised: says of each row whether it teaches anything.
    """
    (folder / "shards").mkdir(parents=True)
    random = np.random.default_rng(0)
    ids = random.integers(4, VOCABULARY, (rows, LENGTH), dtype=np.int32)
    labels = ids.copy()
    labels[:, [0, 10]] = labels[:, 28:] = -100
    for row in range(rows):
        if supervised and not supervised(row):
            labels[row] = -100
    segments = np.tile(np.array([10, 18], np.int32), rows)
    with (
        pa.OSFile(str(folder / "shards/train-00000.arrow"), "wb") as file,
        pa.ipc.new_file(file, schema(LENGTH)) as writer,
    ):
        fill, starts = np.full(rows, 28), np.arange(rows + 1) * 2
        writer.write_batch(row_batch(ids, labels, fill, starts, segments, np.zeros_like(segments)))
    manifest = {"format_version": "3.0", "row_length": LENGTH, "records": {}}
    manifest["payload"] = describe_files(folder / "shards")
    return PackedRows(Artifact(folder / "manifest.json", manifest, folder / "shards"), "train")


def spec(lora: Lora | None = None, **training: Any) -> SftSpec:
    settings = {"epochs": 3, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.01} | training
    shape = Scratch(hidden_size=8, intermediate_size=8, layers=1, heads=1)
    return SftSpec(base=shape, training=Training(**settings), lora=lora, quantization=None)


def train(
    folder: Path,
    rows: PackedRows,
    made: SftSpec,
    model: Any = "llama",
    trainer=SftTrainer,
    every: int = 4,
    config: Any = None,
) -> Outcome:
    """Train in the work folder `folder`; `model` is a family, or makes a model."""
    work = WorkFolder(folder)
    if "RANK" not in os.environ:
        # Of several processes none empties the folder: who launches them has done so.
        work.start()

    def load(weights_dtype, quantization):
        return tiny_model(model) if isinstance(model, str) else model()

    operation = executed(made.training, checkpoint_steps=every, log_steps=1, allow_cpu=True)
    return pipeline.train(trainer, rows, Run(spec=made, operation=operation, work=work, compute=CPU), load, config)


def stop_after(save: int, monkeypatch) -> None:
    """End the training when its `save`th checkpoint is complete."""
    counted = iter(range(1, 10**6))
    on_save = checkpoints.MarkComplete.on_save

    def saved(self, *arguments, **keywords):
        on_save(self, *arguments, **keywords)
        if next(counted) == save:
            raise Interrupted

    monkeypatch.setattr(checkpoints.MarkComplete, "on_save", saved)


def main(folder: Path, stop: int) -> None:
    """One of the processes of a training."""
    import pytest

    patch = pytest.MonkeyPatch()
    if stop:
        stop_after(stop, patch)
    try:
        outcome = train(folder, PackedRows(read_pack(folder.parent), "train"), spec())
    except Interrupted:
        # Without the goodbyes that a killed process doesn't say either.
        os._exit(0)
    if int(os.environ.get("RANK", 0)) == 0:
        checkpoints.save_file(
            {"losses": torch.tensor([entry["loss"] for entry in outcome.run["history"]])}, folder / "losses"
        )


def run_forked(folder: Path, count: int, stop: int = 0) -> None:
    """The processes of a training, told what torch's launcher tells them; none of them has to import anything."""
    WorkFolder(folder).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    ranks = []
    for rank in range(count):
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        ranks.append(FORKED.Process(target=main, args=(folder, stop)))
        ranks[-1].start()
    while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        wait(running)
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                # It would wait for the one that failed.
                rank.kill()
            sys.exit(f"{folder.name} failed")


def read_pack(folder: Path) -> Artifact:
    manifest = {"format_version": "3.0", "row_length": LENGTH, "records": {}}
    manifest["payload"] = describe_files(folder / "pack/shards")
    return Artifact(folder / "pack/manifest.json", manifest, folder / "pack/shards")


if __name__ == "__main__":
    # Runs one after the other, each as name:processes or name:processes:stop.
    for run in sys.argv[2:]:
        name, *numbers = run.split(":")
        run_forked(Path(sys.argv[1]) / name, *map(int, numbers))
