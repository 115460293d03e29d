"""Packed rows (format v3.0) on transformers' Trainer: what SFT and DPO share.

The loss is averaged over a whole optimizer step, over tokens or pairs, however they fall into micro-batches and processes.
"""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer

from snaketune.models.batches import collate
from snaketune.models.devices import Compute
from snaketune.models.packable import check_config
from snaketune.models.selftest import self_test
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.training.trainer import BaseTrainer, Run, training_arguments


class PackedTrainer(BaseTrainer, Trainer):
    """A Trainer whose batches come from `collate`; subclasses say what the loss is and what it is averaged over."""

    def __init__(self, *, model: torch.nn.Module, rows: PackedRows, run: Run):
        items = EqualTokens(rows)
        super().__init__(
            run=run,
            rows=rows,
            model=model,
            args=training_arguments(run, len(items)),
            train_dataset=items,
            data_collator=self._collate_items,
        )
        # Losses here are sums over the batch divided by what the whole step holds, so nothing is left to scale.
        self.model_accepts_loss_kwargs = True

    @staticmethod
    def check_config(config: PretrainedConfig, rows: PackedRows) -> None:
        check_config(config, rows.longest[0], rows.has_prefixes)

    @staticmethod
    def check_model(
        model: PreTrainedModel, rows: PackedRows, compute: Compute
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show that packing doesn't change what the model sees."""
        tested = self_test(model, [rows], compute, training=True)
        return tested.about(), {"self_test_share": tested.share}

    def counts(self) -> dict[str, int]:
        return super().counts() | {"tokens_per_epoch": self.rows.tokens}

    def _collate_items(self, items: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return self.collate([row for rows in items for row in rows], self.run.compute.kernel)

    @staticmethod
    def collate(rows: list[dict[str, Any]], kernel: str) -> dict[str, Any]:
        return collate(rows, kernel)

    def items(self, batch: dict[str, Any]) -> int:
        """What the loss of an optimizer step is averaged over."""
        raise TypeError("a subclass defines this")

    def batch_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """The batch's loss, summed over its items."""
        raise TypeError("a subclass defines this")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The Trainer's hook."""
        placed, supervised = inputs["segments"].layout, len(inputs["targets"])
        prefixes_D, lengths_D = placed.prefix_lengths[placed.documents], placed.lengths[placed.documents]
        self.gauge.count(prefixes_D, lengths_D, supervised=supervised, projected=supervised)
        # A step may have no items at all: rows in which nothing is supervised teach nothing.
        loss = self.batch_loss(model, inputs) / num_items_in_batch.clamp(min=1)
        if self.args.world_size > 1:
            # Gradients are averaged over processes, and each process holds a part of the step's items.
            loss = loss * self.args.world_size
        return loss

    def _get_num_items_in_batch(self, batch_samples, device):
        # Filled in on the device: a copy there would wait for it.
        total = torch.full((), sum(self.items(batch) for batch in batch_samples), device=device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total
