"""Complete packed trainings of tiny models in this process, without the workflow."""

import gc
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Scratch
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.model.device_speed import peak_of, probe
from snaketune.engine.model.devices import Compute
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.packing.shards import documents_schema, list_columns, row_batch, schema
from snaketune.engine.sft import SftTrainer
from snaketune.models.load_model import reload_model
from snaketune.packing.reader import open_rows, sources_of
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.tables import write_table
from snaketune.training import pipeline
from snaketune.training.prepared import PreparedTraining, TrainingRun
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.training.executed import executed, loss_of, made_by

LENGTH = 32
FORKED = multiprocessing.get_context("fork")


class Interrupted(BaseException):
    """Stands for a killed process."""


def prepare_forks(folder: Path) -> None:
    """Measure the machine once for all forks of this process, and let them share its memory with it."""
    probed = probe(CPU.device, folder)
    pipeline.probe = lambda device, state: probed
    peak_of(CPU)
    # A fork's search for garbage would otherwise copy all that is in memory.
    gc.collect()
    gc.freeze()


def pack(
    folder: Path, rows: int = 22, supervised: Any = None, documents: tuple[int, ...] = (10, 18), prefix: int = 0
) -> PackedRows:
    """Write rows of these documents each, by default two and four padding tokens.

    Args:
        supervised: whether a row has supervised tokens, given its number.
        prefix: if not 0, all documents but the first continue its first so many tokens, as the turns of a conversation do.
    """
    (folder / "shards").mkdir(parents=True)
    random = np.random.default_rng(0)
    ids = random.integers(4, VOCABULARY, (rows, LENGTH), dtype=np.int32)
    labels = ids.copy()
    *starts, used = np.cumsum([0, *documents])
    labels[:, starts] = labels[:, used:] = -100
    for row in range(rows):
        if supervised and not supervised(row):
            labels[row] = -100
    segments = np.tile(np.array(documents, np.int32), rows)
    with (
        pa.OSFile(str(folder / "shards/train-00000.arrow"), "wb") as file,
        pa.ipc.new_file(file, schema(LENGTH, list_columns("sft", version := "3.1" if prefix else "3.0"))) as writer,
    ):
        fill, offsets = np.full(rows, used), np.arange(rows + 1) * len(documents)
        prefixes = np.tile(np.array([0, *[prefix] * (len(documents) - 1)], np.int32), rows)
        parents = np.zeros_like(segments) if prefix else None
        writer.write_batch(row_batch(ids, labels, fill, offsets, segments, prefixes, parents))
    # The documents of a row are of two sources; the branches of a tree are one document.
    described = [
        {"split": "train", "row": row, "id": f"{row}-{number}", "tokens": 1, "supervised": 1, "source": number % 2}
        for row in range(rows)
        for number in range(1 if prefix else len(documents))
    ]
    write_table(folder / "shards/documents.arrow", pa.Table.from_pylist(described, schema=documents_schema("sft")))
    manifest = {"format_version": version, "row_length": LENGTH, "records": {}}
    manifest["payload"] = describe_files(folder / "shards")
    return open_rows(Artifact(folder / "manifest.json", manifest, folder / "shards"), "train")


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
    log_steps: int = 1,
    config: Any = None,
    launch: str | None = None,
    zero_stage: int | None = None,
    compute: Compute = CPU,
    held_out: PackedRows | None = None,
    evaluate: Any = False,
    **further: Any,
) -> Outcome:
    """Train in the work folder `folder`; `model` is a family, or a function that makes a model; `held_out` is measured as
    `evaluate` says; `further` are keys of the operation."""
    work = WorkFolder(folder)
    if "RANK" not in os.environ:
        # In several processes their launcher has emptied the folder.
        work.start()

    def load(weights_dtype, quantization):
        loaded = tiny_model(model) if isinstance(model, str) else model()
        return reload_model(loaded, weights_dtype=weights_dtype, quantization=quantization) if quantization else loaded

    processes = int(os.environ.get("WORLD_SIZE", 1))
    operation = executed(
        made.training,
        checkpoint_steps=every,
        log_steps=log_steps,
        gpus=processes,
        launch=launch,
        zero_stage=zero_stage,
        evaluate=evaluate,
        **further,
    )
    run = TrainingRun(spec=made, operation=operation, work=work, compute=compute)
    initial = made_by(load, config)
    loss = loss_of(made)
    prepared = PreparedTraining(
        trainer_class=trainer, rows=rows, run=run, initial=initial, held_out=held_out, loss=loss
    )
    return pipeline.train(prepared)


def stop_after(save: int, monkeypatch) -> None:
    """Interrupt the training when its `save`th checkpoint is complete."""
    counted = iter(range(1, 10**6))
    on_save = TrainingFeatures.on_save

    def saved(self, *arguments, **keywords):
        on_save(self, *arguments, **keywords)
        if next(counted) == save:
            raise Interrupted

    monkeypatch.setattr(TrainingFeatures, "on_save", saved)


def copy_after(save: int, work: Path, copy: Path, monkeypatch) -> None:
    """Copy the work folder of the next training when its `save`th checkpoint is complete: it is what a kill would leave then.

    So a test that compares a resumed training with an undisturbed one trains the steps before the kill once.
    """
    counted = iter(range(1, 10**6))
    on_save = TrainingFeatures.on_save

    def saved(self, *arguments, **keywords):
        on_save(self, *arguments, **keywords)
        if Path(arguments[0].output_dir).is_relative_to(work) and next(counted) == save:
            shutil.copytree(work, copy)

    monkeypatch.setattr(TrainingFeatures, "on_save", saved)


def held_out_pack(folder: Path, **what: Any) -> PackedRows:
    """Write rows as `pack` does; return them as a training reads its held-out rows."""
    pack(folder / "pack", **what)
    return open_rows(read_pack(folder, "3.1" if what.get("prefix") else "3.0"), "train", columns=sources_of)


def read_pack(folder: Path, version: str = "3.0") -> Artifact:
    """Return the artifact of rows that another process wrote to `folder`."""
    manifest = {"format_version": version, "row_length": LENGTH, "records": {}}
    manifest["payload"] = describe_files(folder / "pack/shards")
    return Artifact(folder / "pack/manifest.json", manifest, folder / "pack/shards")
