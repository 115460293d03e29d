"""Packed rows (format v3) on transformers' Trainer: what SFT and DPO share.

The loss is averaged over a whole optimizer step, over tokens or pairs, however they fall into micro-batches and processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer

from snaketune.errors import SnaketuneError
from snaketune.models.batches import Batch, collate
from snaketune.models.compiling import CompileChoice, choose_compilation, compile_layers, layers_of
from snaketune.models.devices import Compute, use_threads
from snaketune.models.kernels import ANY_SHAPE
from snaketune.models.logprobs import summed_losses
from snaketune.models.packing_support import check_config
from snaketune.models.selftest import TOLERANCE, self_test
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.training.loop.trainer import BaseTrainer, Run, training_arguments


class PackedTrainer(BaseTrainer, Trainer):
    """A Trainer whose batches come from `collate`; subclasses say what the loss is and what it is averaged over."""

    def __init__(self, *, model: torch.nn.Module, rows: PackedRows, run: Run):
        items = EqualTokens(rows)
        micro_batch_rows = run.operation.micro_batch_rows
        use_threads(model.config.get_text_config().hidden_size, micro_batch_rows * rows.row_length, run.compute)
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
    def check_config(config: PretrainedConfig, rows: PackedRows, compute: Compute) -> None:
        check_config(config, rows.longest[0], rows.has_prefixes, compute.kernel)

    @staticmethod
    def check_model(
        model: PreTrainedModel, rows: PackedRows, compute: Compute
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show that packing doesn't change what the model sees."""
        tested = self_test(model, [rows], compute, training=True)
        return tested.about(), {"self_test_share": tested.share}

    def counts(self) -> dict[str, int]:
        return super().counts() | {"tokens_per_epoch": self.rows.tokens}

    def item_weights(self) -> np.ndarray | None:
        return self.train_dataset.pairs

    def compile(self) -> None:
        training = self.run.spec.training
        flops = self.gauge.flops.per_token * self.rows.tokens * training.epochs
        choice = choose_compilation(training.compile, flops, self.run.compute.device)
        if choice.compiled and training.compile == "auto" and not layers_of(self.model):
            choice = CompileChoice(compiled=False, reason="auto: this model has no layers that can be compiled")
        print(f"compiled: {'yes' if choice.compiled else 'no'} ({choice.reason})", flush=True)
        if not choice.compiled:
            return
        self.compiled = True
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        before, again = self._loss_before(batch), self._loss_before(batch)
        compile_layers(self.model, self.run.compute, checkpointing=self.run.operation.gradient_checkpointing)
        _check_compiled(before, again, self._loss_before(batch), self.run.compute)

    def _loss_before(self, batch: dict[str, Any]) -> torch.Tensor:
        """A batch's loss, computed as in training but without a trace of it."""
        self.model.train()
        with self.as_in_training():
            return summed_losses(self.model, batch).detach()

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """For a forward pass outside the loop: the data type of the run's steps, and random states put back at the end.

        The loop's own autocast is in the model's forward only once accelerate has prepared the model.
        """
        device = self.run.compute.device
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []), self.run.compute.autocast():
            yield

    def _collate_items(self, items: list[list[dict[str, Any]]]) -> Batch:
        rows = [row for some in items for row in some]
        if self.compiled and self.run.compute.kernel not in ANY_SHAPE:
            # The last batch of an epoch may be smaller, and so may the last item of each length.
            items = [*items, *[[]] * (self.args.per_device_train_batch_size - len(items))]
            missing = (self.rows.row_length - sum(len(row["input_ids"]) for row in some) for some in items)
            rows += [self.rows.blank(tokens) for tokens in missing if tokens]
        return self.collate(rows, self.run.compute.kernel, self.rows.longest[0])

    @staticmethod
    def collate(rows: list[dict[str, Any]], kernel: str, longest: int | None = None) -> Batch:
        return collate(rows, kernel, longest)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The Trainer's hook; its own moves no segments, and under DeepSpeed casts every float of a batch."""
        return inputs.to(self.args.device)

    def items(self, batch: dict[str, Any]) -> tuple[int, ...]:
        """How much the batch holds of each thing that the loss of an optimizer step is averaged over."""
        raise TypeError("a subclass defines this")

    def batch_loss(self, model: torch.nn.Module, batch: dict[str, Any], totals: torch.Tensor) -> torch.Tensor:
        """What the batch adds to the loss of its step, a scalar. Args: totals: int64, the items of the whole step."""
        raise TypeError("a subclass defines this")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The Trainer's hook."""
        placed = inputs["segments"].layout
        prefixes_D, lengths_D = placed.prefix_lengths[placed.documents], placed.lengths[placed.documents]
        self.gauge.count(prefixes_D, lengths_D, supervised=len(inputs["targets"]), projected=len(inputs["sources"]))
        loss = self.batch_loss(model, inputs, num_items_in_batch)
        if self.args.world_size > 1:
            # Gradients are averaged over processes, and each process holds a part of the step's items.
            loss = loss * self.args.world_size
        return loss

    def _get_num_items_in_batch(self, batch_samples, device):
        # Filled in on the device: a copy there would wait for it.
        items = zip(*(self.items(batch) for batch in batch_samples))
        totals = torch.stack([torch.full((), sum(some), device=device) for some in items])
        return self.accelerator.gather(totals[None]).sum(0) if self.args.world_size > 1 else totals


def _check_compiled(before: torch.Tensor, again: torch.Tensor, compiled: torch.Tensor, compute: Compute) -> None:
    """Compiled layers compute what they computed before, which can be seen where they compute the same twice.

    Raises:
        SnaketuneError: they don't.
    """
    if before == again and not abs(compiled - before) <= TOLERANCE[compute.dtype] * abs(before):
        raise SnaketuneError(
            f"training.compile: the compiled model's loss is {compiled.item():.6g}, {before.item():.6g} before; nothing was "
            "trained. Set it to false"
        )
