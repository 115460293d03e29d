"""The trainer of the `sft` stage, for packed or raw rows.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean negative log-probability over all supervised tokens of an optimizer step.
"""

import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.logprobs import summed_losses, token_losses
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

    def held_out_metrics(self, batches):
        total, tokens = 0.0, 0
        for batch in batches:
            losses_N = token_losses(self.model_wrapped, batch)
            total, tokens = total + float(losses_N.cpu().double().sum()), tokens + len(losses_N)
        if self.gather_processes:
            sums = torch.tensor([[total, tokens]], dtype=torch.float64, device=self.args.device)
            total, tokens = self.gather_processes(sums).sum(0).tolist()
        return {"loss": total / max(tokens, 1)}


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
        held_out = PackedRows(pack, "held_out", run.operation.load_in_memory)
        return PreparedTraining.of(SftTrainer, rows, run, initial, held_out, tokenizer.folder)
    # TRL takes a second to import.
    from snaketune.training.loop.trl_trainer import RawRows, RawTrainer

    return PreparedTraining.of(RawTrainer, RawRows(pack, tokenizer.folder), run, initial)
