"""The trainer of the `sft` stage, for packed or raw rows.

Packed rows (format 3.0) train on transformers' Trainer with attention over segments; raw rows (format 2.0) on TRL's
SFTTrainer. The loss is the mean over all supervised tokens of an optimizer step, weighted by the weights of their turns.
"""

import numpy as np
import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.packed_trainer import PackedTrainer
from snaketune.engine.packing.shards import FORMAT_VERSIONS
from snaketune.engine.trainer import PreparedTraining, TrainingRun
from snaketune.models.adapter_stack import AdapterStack


class SftTrainer(PackedTrainer):
    """A Trainer on packed rows with cross-entropy over supervised tokens."""

    def items(self, batch):
        return (batch.get("weight", len(batch["targets"])),)

    def batch_loss(self, model, batch, totals):
        dft = self.run.spec.loss == "dft"
        if dft or "weights" in batch:
            losses_N = token_losses(model, batch)
            if dft:
                # Weighted by the tokens' probabilities (Wu et al., 2025).
                losses_N = losses_N * torch.exp(-losses_N.detach())
            total = (losses_N * batch.get("weights", 1.0)).sum()
        else:
            total = summed_losses(model, batch)
        # A step may have no supervised token at all; its loss is then 0.
        return total / torch.where(totals[0] > 0, totals[0], 1)

    @staticmethod
    def collate(rows, kernel, longest=None):
        batch = collate(rows, kernel, longest)
        if "source" in rows[0]:
            batch["document_sources"] = torch.from_numpy(np.concatenate([row["source"] for row in rows]))
        return batch

    def held_out_metrics(self, batches):
        # Summed losses and numbers of tokens, by source.
        sums_S2 = torch.zeros(self.held_out.rows.sources, 2, dtype=torch.float64)
        for batch in batches:
            losses_N = token_losses(self.model_wrapped, batch).cpu().double()
            layout = batch["segments"].layout
            # The turns of a conversation may be several segments, which form a tree.
            tree_D = torch.from_numpy(layout.trees[layout.documents])
            source_N = batch["document_sources"].cpu()[tree_D[batch["target_documents"].cpu()]]
            sums_S2.index_add_(0, source_N, torch.stack([losses_N, torch.ones_like(losses_N)], dim=1))
        if self.gather_processes:
            gathered = self.gather_processes(sums_S2.to(self.args.device)[None])
            sums_S2 = gathered.sum(0).cpu()
        total, tokens = sums_S2.sum(0).tolist()
        measured = [(source, *pair) for source, pair in enumerate(sums_S2.tolist()) if pair[1]]
        by_source = {f"sources.{source}/loss": loss / count for source, loss, count in measured}
        return {"loss": total / max(tokens, 1)} | (by_source if len(sums_S2) > 1 else {})


def prepare_training(
    run: TrainingRun, pack: Artifact, tokenizer: Artifact, results: tuple[Artifact, ...] = ()
) -> PreparedTraining:
    """Prepare a training on rows of either format, from `results` if there are any, else from the spec's base."""
    spec = run.spec
    initial = AdapterStack(
        results=results, base=spec.base, tokenizer=tokenizer.folder, trust_remote_code=spec.trust_remote_code
    )
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = open_rows(pack, "train", run.operation.load_in_memory)
        held_out = open_rows(pack, "held_out", run.operation.load_in_memory, columns=sources_of)
        prepared = PreparedTraining(trainer_class=SftTrainer, rows=rows, run=run, initial=initial, held_out=held_out)
        return prepared.with_kernel()
    # TRL takes a second to import.
    from snaketune.training.trl_trainer import RawRows, RawTrainer

    return PreparedTraining(trainer_class=RawTrainer, rows=RawRows(pack, tokenizer.folder), run=run, initial=initial)
