"""What the `sft` stage launches: the trainer of supervised tokens, on packed or raw rows.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import shutil
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.models.loading import load_base, read_config
from snaketune.models.logprobs import token_losses
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import FORMAT_VERSION
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.training import pipeline
from snaketune.training.launch import is_first_process, read_passed
from snaketune.training.packed import PackedTrainer
from snaketune.training.raw import RawRows, RawTrainer
from snaketune.training.trainer import Run


class SftTrainer(PackedTrainer):
    """Learns supervised tokens."""

    def items(self, batch):
        return len(batch["targets"])

    def batch_loss(self, model, batch):
        return token_losses(model, batch).sum()


def train(job: dict[str, Any], work: WorkFolder) -> Outcome:
    """Fill `work.payload`."""
    pack = read_passed(job, "pack", "shards")
    tokenizer = read_passed(job, "tokenizer", "tokenizer")
    tokenizer.files()
    outcome = train_on(Run.of_job(job, SftSpec, work), pack, tokenizer)
    if is_first_process():
        for path in tokenizer.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, work.payload / path.name)
    return outcome


def train_on(run: Run, pack: Artifact, tokenizer: Artifact) -> Outcome:
    """Train on the rows of either format."""
    chat, base = ChatTokenizer.load(tokenizer.folder), run.spec.base

    def load(weights_dtype, quantization):
        return load_base(base, chat, weights_dtype=weights_dtype, quantization=quantization)

    if pack.manifest.get("format_version") == FORMAT_VERSION:
        trainer, rows = SftTrainer, PackedRows(pack, "train", run.operation.load_in_memory)
    else:
        trainer, rows = RawTrainer, RawRows(pack, tokenizer.folder)
    return pipeline.train(trainer, rows, run, load, read_config(base))
