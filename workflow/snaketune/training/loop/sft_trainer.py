"""The trainer of the `sft` stage, for packed or raw rows.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

from snaketune.artifacts.manifest import Artifact
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.logprobs import summed_losses
from snaketune.packing.reader import PackedRows
from snaketune.packing.shards import FORMAT_VERSIONS
from snaketune.training.loop.packed_trainer import PackedTrainer
from snaketune.training.loop.trainer import PreparedTraining, TrainingRun


class SftTrainer(PackedTrainer):
    """A Trainer on packed rows with cross-entropy over supervised tokens."""

    def items(self, batch):
        return (len(batch["targets"]),)

    def batch_loss(self, model, batch, totals):
        # A step may have no supervised token at all; its loss is then 0.
        return summed_losses(model, batch) / totals[0].clamp(min=1)


def prepare_training(
    run: TrainingRun, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()
) -> PreparedTraining:
    """Prepare a training on rows of either format, from `results` if there are any, else from the spec's base."""
    spec = run.spec
    initial = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer.folder, trust_remote_code=spec.trust_remote_code
    )
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = PackedRows(pack, "train", run.operation.load_in_memory)
        run = run.with_kernel_for(initial.config() or initial.new_config(), rows, dropout=SftTrainer.drops_out)
        return PreparedTraining.of(SftTrainer, rows, run, initial)
    # TRL takes a second to import.
    from snaketune.training.loop.trl_trainer import RawRows, RawTrainer

    return PreparedTraining.of(RawTrainer, RawRows(pack, tokenizer.folder), run, initial)
