"""Supervised fine-tuning on packed rows: the loss is the mean over all supervised tokens of an optimizer step, weighted by the
weights of their turns."""

from typing import Any, Literal

import numpy as np
import torch

from snaketune.engine.distillation import Distillation, agreement, collate_teacher
from snaketune.engine.model.batches import collate
from snaketune.engine.model.forward import packed_values
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.trainer import PackedTrainer

# Metrics of held-out rows of a training with a teacher.
TEACHER = ("kl", "agreement")


class SftTrainer(PackedTrainer):
    """A Trainer on packed rows with cross-entropy over supervised tokens.

    Attributes:
        loss: negative log-likelihood, or `dft`: weighted by the tokens' probabilities (Wu et al., 2025).
        distillation: how a teacher takes part in the loss; the rows then have its columns.
    """

    loss: Literal["nll", "dft"]
    distillation: Distillation | None

    def __init__(
        self, *, loss: Literal["nll", "dft"] = "nll", distillation: Distillation | None = None, **arguments: Any
    ):
        self.loss, self.distillation = loss, distillation
        super().__init__(**arguments)

    @staticmethod
    def collate(rows, kernel, longest=None):
        batch = collate(rows, kernel, longest)
        if "source" in rows[0]:
            batch["document_sources"] = torch.from_numpy(np.concatenate([row["source"] for row in rows]))
        return batch | collate_teacher(rows, batch) if "teacher_ids" in rows[0] else batch

    def items(self, batch):
        return (batch.get("weight", len(batch["targets"])),)

    def batch_loss(self, model, batch, totals):
        if self.loss == "dft" or self.distillation or "weights" in batch:
            token_losses_of = self.distillation.token_losses if self.distillation else token_losses
            losses_N = token_losses_of(model, batch)
            if self.loss == "dft":
                losses_N = losses_N * torch.exp(-losses_N.detach())
            total = (losses_N * batch.get("weights", 1.0)).sum()
        else:
            total = summed_losses(model, batch)
        # A step may have no supervised token at all; its loss is then 0.
        return total / torch.where(totals[0] > 0, totals[0], 1)

    def held_out_metrics(self, batches):
        # Summed losses and numbers of tokens, by source; with a teacher also divergences, and how often it agrees.
        sums_SK = torch.zeros(self.held_out.rows.sources, 4 if self.distillation else 2, dtype=torch.float64)
        for batch in batches:
            values_NK = self._held_out_values(batch).cpu().double()
            layout = batch["segments"].layout
            # The turns of a conversation may be several segments, which form a tree.
            tree_D = torch.from_numpy(layout.trees[layout.documents])
            source_N = batch["document_sources"].cpu()[tree_D[batch["target_documents"].cpu()]]
            sums_SK.index_add_(0, source_N, values_NK)
        if self.gather_processes:
            gathered = self.gather_processes(sums_SK.to(self.args.device)[None])
            sums_SK = gathered.sum(0).cpu()
        total, tokens, *of_teacher = sums_SK.sum(0).tolist()
        metrics = {name: value / max(tokens, 1) for name, value in zip(("loss", *TEACHER), (total, *of_teacher))}
        measured = [(source, *pair) for source, pair in enumerate(sums_SK[:, :2].tolist()) if pair[1]]
        by_source = {f"sources.{source}/loss": loss / count for source, loss, count in measured}
        return metrics | (by_source if len(sums_SK) > 1 else {})

    def _held_out_values(self, batch: dict[str, Any]) -> torch.Tensor:
        """Loss and 1 of each supervised token, [N, 2]; with a teacher also its divergence and whether it agrees, [N, 4]."""
        if not self.distillation:
            losses_N = token_losses(self.model_wrapped, batch)
            return torch.stack([losses_N, torch.ones_like(losses_N)], 1)
        of_logits = agreement(self.distillation.temperature, batch)
        losses_N, (tokens_U, kl_U) = packed_values(self.model_wrapped, batch, of_logits)
        agrees_U = (tokens_U == batch["teacher_ids"][:, 0]).float()
        rows_N = batch["source_rows"]
        return torch.stack([losses_N, torch.ones_like(losses_N), kl_U[rows_N], agrees_U[rows_N]], 1)
