"""SFT runs as in a worker: a small tokenizer, packed and raw conversations, tiny models."""

from pathlib import Path

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Training
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import SftSpec
from snaketune.tables import write_table
from snaketune.training.prepared import TrainingRun
from tests.models.conftest import CPU, tiny_model
from tests.packing import chain
from tests.tokenization.small_tokenizers import messages
from tests.training.executed import executed

ROWS = [{"id": str(i), "messages": messages(f"cat {i}?", f"ton {i}"), "tools": None} for i in range(12)]


def packed_rows(folder: Path, tokenizer: Artifact) -> Artifact:
    return chain.pack(folder, chain.corpus(folder / "corpus", "sft", ROWS, held_out=0), tokenizer, "sft", length=64)


def raw_rows(folder: Path, rows: int = len(ROWS), version: str = "2.0") -> Artifact:
    """Write raw rows, as the write stage does with packing.strategy none."""
    (folder / "shards").mkdir(parents=True)
    table = pa.Table.from_pylist(ROWS).set_column(2, "tools", pa.nulls(len(ROWS), pa.string()))
    write_table(folder / "shards/train-00000.arrow", table.slice(0, rows))
    manifest = {"format_version": version, "payload": describe_files(folder / "shards"), "records": {}}
    return Artifact(folder / "manifest.json", manifest, folder / "shards")


def sft_spec(folder: Path, lora: Lora | None) -> SftSpec:
    """A spec from scratch, or with adapters on a base whose vocabulary lacks the tokenizer's tokens."""
    settings = Training(epochs=2, batch_rows=4, micro_batch_rows=2, learning_rate=0.01, seed=1)
    base: Pretrained | Scratch = Scratch(hidden_size=16, intermediate_size=16, layers=1, heads=2)
    if lora:
        tiny_model("llama").save_pretrained(folder / "base")
        base = Pretrained(path=str(folder / "base"))
    return SftSpec(base=base, training=settings, lora=lora, quantization=None)


def sft_run(folder: Path, lora: Lora | None = None) -> TrainingRun:
    work = WorkFolder(folder / "work")
    work.start()
    spec = sft_spec(folder, lora)
    operation = executed(spec.training, log_steps=1, checkpoint_steps=2)
    return TrainingRun(spec=spec, operation=operation, work=work, compute=CPU)
