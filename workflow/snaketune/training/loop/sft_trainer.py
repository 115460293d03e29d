"""What the `sft` stage trains with: the trainer of packed rows, or of raw ones, and what it begins with.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

from snaketune.artifacts.manifest import Artifact
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.logprobs import summed_losses
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import FORMAT_VERSIONS
from snaketune.stages.outcome import Outcome
from snaketune.training.loop import pipeline
from snaketune.training.loop.packed_trainer import PackedTrainer
from snaketune.training.loop.pipeline import Begun
from snaketune.training.loop.trainer import Run


class SftTrainer(PackedTrainer):
    """Learns supervised tokens."""

    def items(self, batch):
        return (len(batch["targets"]),)

    def batch_loss(self, model, batch, totals):
        # A step may have no items at all: rows in which nothing is supervised teach nothing.
        return summed_losses(model, batch) / totals[0].clamp(min=1)


def train_on(run: Run, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()) -> Outcome:
    """Train on the rows of either format, from a base or, where there are, from results."""
    return pipeline.train(*begin(run, pack, tokenizer, results))


def begin(run: Run, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()) -> Begun:
    """What a training of these begins with."""
    start = AdapterStack(
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
        from snaketune.training.loop.trl_trainer import RawRows, RawTrainer

        trainer, rows = RawTrainer, RawRows(pack, tokenizer.folder)
    return Begun(trainer, rows, run, start.load, start.config(), start.named_base, start.new_config())
