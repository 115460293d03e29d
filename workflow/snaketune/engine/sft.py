"""Supervised fine-tuning on packed rows: the loss is the mean over all supervised tokens of an optimizer step, weighted by the
weights of their turns."""

from typing import Any, Literal

import numpy as np
import torch

from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.trainer import PackedTrainer


class SftTrainer(PackedTrainer):
    """A Trainer on packed rows with cross-entropy over supervised tokens.

    Attributes:
        loss: negative log-likelihood, or `dft`: weighted by the tokens' probabilities (Wu et al., 2025).
    """

    loss: Literal["nll", "dft"]

    def __init__(self, *, loss: Literal["nll", "dft"] = "nll", **arguments: Any):
        self.loss = loss
        super().__init__(**arguments)

    @staticmethod
    def collate(rows, kernel, longest=None):
        batch = collate(rows, kernel, longest)
        if "source" in rows[0]:
            batch["document_sources"] = torch.from_numpy(np.concatenate([row["source"] for row in rows]))
        return batch

    def items(self, batch):
        return (batch.get("weight", len(batch["targets"])),)

    def batch_loss(self, model, batch, totals):
        if self.loss == "dft" or "weights" in batch:
            losses_N = token_losses(model, batch)
            if self.loss == "dft":
                losses_N = losses_N * torch.exp(-losses_N.detach())
            total = (losses_N * batch.get("weights", 1.0)).sum()
        else:
            total = summed_losses(model, batch)
        # A step may have no supervised token at all; its loss is then 0.
        return total / torch.where(totals[0] > 0, totals[0], 1)

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
