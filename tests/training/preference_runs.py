"""Whole preference trainings of tiny models in this process, on pairs packed as trees or on single completions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.logprobs import all_pair_logprobs
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.shards import IGNORED, documents_schema, list_columns, row_batch, schema
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec
from snaketune.tables import write_table
from snaketune.training import pipeline
from snaketune.training.prepared import TrainingRun
from snaketune.training.prepared_dpo import prepare_dpo
from snaketune.training.reference import logps_table as logps
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.models.made_trees import tree_rows
from tests.training.executed import executed

LENGTH = 32


def packed_pairs(folder: Path, rows: int = 12, kind: str = "preference") -> Artifact:
    """Rows of two or three pairs each; of completions with a label, the second ones are those of other rows."""
    made = [row for seed in range(-(-rows // 3)) for row in tree_rows(VOCABULARY, seed)][:rows]
    ids, labels = np.zeros((rows, LENGTH), np.int32), np.full((rows, LENGTH), IGNORED, np.int32)
    for number, row in enumerate(made):
        ids[number, : len(row["input_ids"])] = row["input_ids"]
        labels[number, : len(row["labels"])] = row["labels"]
    fill = np.array([row["segment_lengths"].sum() for row in made])
    columns = [np.concatenate([row[name] for row in made]) for name in ("segment_lengths", "prefix_lengths")]
    tree = [np.concatenate([row[name] for row in made]) for name in ("prefix_segments", "completions")]
    starts, ends = (
        np.cumsum([0, *(len(row[name]) for row in made)]).astype(np.int32)
        for name in ("segment_lengths", "completions")
    )
    (folder / "shards").mkdir(parents=True)
    with pa.ipc.new_file(
        str(folder / "shards/train-00000.arrow"), schema(LENGTH, list_columns("preference", "3.1"))
    ) as writer:
        writer.write_batch(row_batch(ids, labels, fill, starts, *columns, tree[0], (tree[1], ends)))
    pairs = [row for row, of in enumerate(made) for _ in range(len(of["completions"]) // 2)]
    documents = [
        {"split": "train", "row": row, "id": f"p{number}", "tokens": 9, "supervised": 7, "source": number % 2}
        | {"label": number % 3 > 0}
        for number, row in enumerate(pairs)
    ]
    write_table(folder / "shards/documents.arrow", pa.Table.from_pylist(documents, schema=documents_schema(kind)))
    payload = describe_files(folder / "shards")
    manifest = {"format_version": "3.1", "kind": kind, "pairs": "pairs", "row_length": LENGTH, "records": {}}
    return Artifact(folder / "manifest.json", manifest | {"payload": payload}, folder / "shards")


def referenced(folder: Path, packed: Artifact, model: torch.nn.Module, compute: Compute = CPU) -> Artifact:
    """Reference log-probabilities of the pairs under `model`."""
    rows = open_rows(packed, "train")
    self_test(model, [rows], compute, training=False)
    sums, counts = all_pair_logprobs(model, rows, compute, "reference")
    folder.mkdir(parents=True)
    ids = [f"p{number // 2}" for number in range(2 * len(sums))]
    values = [ids, ["train"] * len(ids), [0, 1] * len(sums), sums.flatten().tolist(), counts.flatten().tolist()]
    table = pa.table(dict(zip(logps.schema().names, values)), schema=logps.schema())
    write_table(folder / "logps.arrow", table)
    facts = {"inputs": {"model": ["m"], "pack": ["pairs"]}, "spec": {"quantization": None, "base": None}, "records": {}}
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    facts |= compute.about() | {"weights_dtype": weights, "payload": describe_files(folder)}
    return Artifact(folder.parent / "ref.json", facts, folder)


class Start:
    """The SFT run's result."""

    content, manifest = "m", {}

    def __init__(self, folder: Path):
        self.folder = folder


class Trained:
    """Initial weights, pairs and their reference log-probabilities; runs any number of trainings on them.

    Args:
        frozen: whether adapters are trained, so that base weights have the data type of the computation.
    """

    def __init__(
        self,
        folder: Path,
        kind: str = "preference",
        rows: int = 12,
        family: str = "llama",
        compute: Compute = CPU,
        frozen: bool = False,
    ):
        self.folder, self.compute = folder, compute
        model = tiny_model(family).to(compute.weights_dtype(frozen=frozen))
        self.packed = packed_pairs(folder / "pairs", rows, kind)
        self.reference = referenced(folder / "pairs/logps", self.packed, model.eval(), compute)
        tiny_model(family).save_pretrained(folder / "model")

    def train(
        self,
        name: str,
        loss_settings: dict[str, Any],
        *,
        every: int = 100,
        log_steps: int = 1,
        lora: Lora | None = None,
        evaluate: Any = False,
        **training: Any,
    ) -> tuple[Outcome, WorkFolder]:
        """Args: loss_settings: keys of the loss; every: steps between checkpoints; evaluate: how the training's own pairs are
        measured; training: its settings."""
        settings = {"epochs": 3, "batch_rows": 4, "micro_batch_rows": 4, "learning_rate": 0.01, "seed": 1} | training
        made = DpoSpec(
            **{"beta": 0.5, **loss_settings},
            training=Training(**settings),
            lora=lora,
            quantization=None,
            trust_remote_code=False,
        )
        work = WorkFolder(self.folder / name)
        work.start()
        operation = executed(made.training, log_steps=log_steps, checkpoint_steps=every, evaluate=evaluate)
        run = TrainingRun(spec=made, operation=operation, work=work, compute=self.compute)
        references = [self.reference] if made.needs_reference else []
        prepared = prepare_dpo(run, (Start(self.folder / "model"),), self.packed, *references)
        return pipeline.train(replace(prepared, held_out=prepared.rows)), work
