"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model; in launched processes.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.models.logprobs import summed_losses
from snaketune.models.stacked import Stack
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import FORMAT_VERSIONS
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.tracking.curves import Tracked
from snaketune.training import pipeline
from snaketune.training.launched import is_first_process
from snaketune.training.packed import PackedTrainer
from snaketune.training.pipeline import Begun
from snaketune.training.saving import tell_other_tokenizer
from snaketune.training.trainer import Run


class SftTrainer(PackedTrainer):
    """Learns supervised tokens."""

    def items(self, batch):
        return (len(batch["targets"]),)

    def batch_loss(self, model, batch, totals):
        # A step may have no items at all: rows in which nothing is supervised teach nothing.
        return summed_losses(model, batch) / totals[0].clamp(min=1)


def build(
    spec: SftSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: list[Path],
    model: Sequence[Artifact] = (),
    beneath: Sequence[Artifact] = (),
    tracked: Tracked | None = None,
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer; or with an adapter in their place.

    Args:
        model, beneath: the result that it starts from, and what lies beneath that.
    """
    tokenizer.files()
    for result in (*model, *beneath):
        result.files()
    outcome = train_on(Run.of(spec, operation, work, tracked), pack, tokenizer, (*model, *beneath))
    if is_first_process():
        for path in tokenizer.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copyfile(path, work.payload / path.name)
        tell_other_tokenizer(work.payload)
    return outcome


def train_on(run: Run, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()) -> Outcome:
    """Train on the rows of either format, from a base or, where there are, from results."""
    return pipeline.train(*begin(run, pack, tokenizer, results))


def begin(run: Run, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()) -> Begun:
    """What a training of these begins with."""
    start = Stack(
        results=results,
        base=run.spec.base,
        tokenizer=tokenizer.folder,
        trust_remote_code=run.spec.trust_remote_code,
    )
    if pack.manifest.get("format_version") == FORMAT_VERSIONS["sft"]:
        trainer, rows = SftTrainer, PackedRows(pack, "train", run.operation.load_in_memory)
        run = run.suited(start.config() or start.new_config(), dropout=trainer.drops_out)
    else:
        # TRL takes a second to import.
        from snaketune.training.raw import RawRows, RawTrainer

        trainer, rows = RawTrainer, RawRows(pack, tokenizer.folder)
    return Begun(trainer, rows, run, start.load, start.config(), start.named_base, start.new_config())
