"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model; in launched processes.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import shutil
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.runs import Execution
from snaketune.models.loading import load_base, read_config, scratch_config
from snaketune.models.logprobs import summed_losses
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import FORMAT_VERSION
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tracking.curves import Tracked
from snaketune.training import pipeline
from snaketune.training.launched import is_first_process
from snaketune.training.packed import PackedTrainer
from snaketune.training.raw import RawRows, RawTrainer
from snaketune.training.saving import tell_other_tokenizer
from snaketune.training.trainer import Run


class SftTrainer(PackedTrainer):
    """Learns supervised tokens."""

    def items(self, batch):
        return len(batch["targets"])

    def batch_loss(self, model, batch):
        return summed_losses(model, batch)


def build(
    spec: SftSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: list[Path],
    tracked: Tracked | None = None,
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer."""
    tokenizer.files()
    outcome = train_on(Run.of(spec, operation, work, tracked), pack, tokenizer)
    if is_first_process():
        for path in tokenizer.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, work.payload / path.name)
        tell_other_tokenizer(work.payload)
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
    return pipeline.train(trainer, rows, run, load, read_config(base), made_by=scratch_config(base, chat))
