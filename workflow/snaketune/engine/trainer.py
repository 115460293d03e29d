"""Training on packed rows with transformers' Trainer; the base class of SFT, DPO and reward models.

The loss is a mean over all tokens or pairs of an optimizer step, independent of micro-batches and processes. Mixtures of
experts add their load-balancing loss if their config asks for it, a mean over the step's rows (`engine.model.router_loss`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from snaketune.engine.embedding_noise import EmbeddingNoise
from snaketune.engine.eva import initialize_by_eva
from snaketune.engine.features import Options, TrainingFeatures
from snaketune.engine.model.batches import Batch, collate
from snaketune.engine.model.compiling import CompileChoice, choose_compilation, compile_layers, layers_of
from snaketune.engine.model.devices import Compute, use_threads
from snaketune.engine.model.forward import inner_model
from snaketune.engine.model.kernels import ANY_SHAPE, SEPARATE
from snaketune.engine.model.logit_differences import TOLERANCE
from snaketune.engine.model.logprobs import summed_losses
from snaketune.engine.model.router_loss import RouterLoss, router_rows
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.errors import SnaketuneError


def offloaded_activations(model: torch.nn.Module) -> AbstractContextManager[None]:
    """A context in which the activations that a backward pass needs are moved to host memory, by TRL."""
    # TRL takes a second to import.
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    return get_act_offloading_ctx_manager(model)


class PackedTrainer(TrainingFeatures, Trainer):
    """A Trainer whose batches come from `collate`; subclasses define the loss and the items that it is averaged over."""

    # Whether mixtures of experts have their load-balancing loss where their config asks for it.
    balances_experts = True
    # None unless the model's config asks for it; and the rows of the step, without those of padding alone, counted for it.
    router_loss: RouterLoss | None
    step_rows: torch.Tensor | None = None
    activations: AbstractContextManager[None]

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        args: TrainingArguments,
        train_dataset: PackedRows,
        compute: Compute,
        options: Options,
        **arguments: Any,
    ):
        """
        Args:
            model: one that has passed `engine.model.selftest.self_test` with the kernel of `compute`, with its adapters.
        """
        self.router_loss = RouterLoss.of(inner_model(model)) if self.balances_experts else None
        use_threads(model.config, compute)
        super().__init__(
            rows=train_dataset,
            compute=compute,
            options=options,
            model=model,
            args=args,
            train_dataset=EqualTokens(train_dataset),
            data_collator=self._collate_items,
            **arguments,
        )
        if options.neftune_noise_alpha:
            EmbeddingNoise(inner_model(model), options.neftune_noise_alpha)
        # transformers' own noise knows no documents.
        self.neftune_noise_alpha = None
        self.activations = offloaded_activations(model) if options.offload else nullcontext()
        # `batch_loss` already divides by the items of the whole step, so the Trainer must not scale it again.
        self.model_accepts_loss_kwargs = True

    @property
    def has_frozen_base(self) -> bool:
        return hasattr(self.accelerator.unwrap_model(self.model), "peft_config")

    def initialize_adapters(self) -> None:
        if self.options.eva:
            initialize_by_eva(self.model, self.rows, self.compute, self.args.seed)

    def counts(self) -> dict[str, int]:
        return super().counts() | {"tokens_per_epoch": self.rows.tokens}

    def item_weights(self) -> np.ndarray | None:
        return self.train_dataset.pairs

    def compile(self) -> None:
        setting, compute = self.options.compile, self.compute
        flops = self.meter.flops.per_token * self.rows.tokens * self.args.num_train_epochs
        choice = choose_compilation(setting, flops, compute.device)
        if choice.compiled and setting == "auto" and not layers_of(self.model):
            choice = CompileChoice(compiled=False, reason="auto: this model has no layers that can be compiled")
        if setting == "auto" and compute.kernel == SEPARATE:
            choice = CompileChoice(compiled=False, reason="auto: documents run separately, in shapes that vary")
        print(f"compiled: {'yes' if choice.compiled else 'no'} ({choice.reason})", flush=True)
        if not choice.compiled:
            return
        self.compiled = True
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        eager, again = self._loss_of(batch), self._loss_of(batch)
        compile_layers(self.model, compute, checkpointing=self.args.gradient_checkpointing)
        _check_compiled(eager, again, self._loss_of(batch), compute)

    def _loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch, computed as in training but without side effects."""
        self.model.train()
        with self.as_in_training():
            return summed_losses(self.model, batch).detach()

    @contextmanager
    def as_in_training(self, autocast: bool = True, step_precision: bool = True) -> Iterator[None]:
        """Run forward passes without a trace: random states of host and device are restored at the end.

        Args:
            autocast: whether to add the autocast of a step, for a model that accelerate hasn't prepared.
            step_precision: whether matrices are multiplied at the precision of training steps.
        """
        compute = self.compute
        device = compute.device
        restored = torch.random.fork_rng([device.index] if device.type == "cuda" else [])
        cast = compute.autocast() if autocast else nullcontext()
        with restored, cast, compute.training_precision() if step_precision else nullcontext():
            yield

    # A step, in the order of its calls: batch, items of the whole step, loss of a micro-batch.

    def _collate_items(self, items: list[list[dict[str, Any]]]) -> Batch:
        rows = [row for item in items for row in item]
        if self.compiled and self.compute.kernel not in ANY_SHAPE:
            # The last batch of an epoch may be smaller, and so may the last item of each length.
            items = [*items, *[[]] * (self.args.per_device_train_batch_size - len(items))]
            missing = (self.rows.row_length - sum(len(row["input_ids"]) for row in item) for item in items)
            rows += [self.rows.blank(tokens) for tokens in missing if tokens]
        batch = self.collate(rows, self.compute.kernel, self.rows.longest[0])
        return batch | router_rows(rows, batch["segments"].layout.document_of) if self.router_loss else batch

    collate = staticmethod(collate)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Move a batch to the device. The Trainer's own hook moves no segments, and under DeepSpeed casts all floats."""
        return inputs.to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples, device):
        # Created on the device, since a copy from the host would wait for it.
        counts = zip(*((len(batch.get("router_rows", ())), *self.items(batch)) for batch in batch_samples))
        totals = torch.stack([torch.full((), sum(count), device=device) for count in counts])
        totals = self.accelerator.gather(totals[None]).sum(0) if self.args.world_size > 1 else totals
        self.step_rows = totals[0]
        return totals[1:]

    def items(self, batch: dict[str, Any]) -> tuple[int, ...]:
        """Count the items of a batch that the loss of an optimizer step is averaged over, one count per kind of item."""
        raise TypeError("a subclass defines this")

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        with self.activations, self.compute.training_precision():
            return super().training_step(*arguments, **keywords)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Count the batch's tokens and FLOPs, and return its share of the step's loss."""
        layout = inputs["segments"].layout
        prefixes_D, lengths_D = layout.prefix_lengths[layout.documents], layout.lengths[layout.documents]
        self.meter.count(prefixes_D, lengths_D, supervised=len(inputs["targets"]), projected=len(inputs["sources"]))
        if self.router_loss is None:
            loss = self.batch_loss(model, inputs, num_items_in_batch)
        else:
            with self.router_loss.recorded() as logits:
                loss = self.batch_loss(model, inputs, num_items_in_batch)
            loss = loss + self.router_loss.summed(logits, inputs) / self.step_rows.clamp(min=1)
        # Gradients are averaged over processes, but each loss is already divided by the items of all processes.
        return loss * self.args.world_size if self.args.world_size > 1 else loss

    def gather_pairs(self, rows_PK: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all processes in the order of their ranks, and the index of this process' first row."""
        if self.args.world_size == 1:
            return rows_PK, 0
        sizes = self.accelerator.gather(torch.full((1,), len(rows_PK), device=rows_PK.device)).tolist()
        gathered = self.accelerator.gather(self.accelerator.pad_across_processes(rows_PK)[None])
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes)]), sum(sizes[: self.args.process_index])

    def batch_loss(self, model: torch.nn.Module, batch: dict[str, Any], totals: torch.Tensor) -> torch.Tensor:
        """The batch's share of the loss of its step, a scalar. Args: totals: int64, the items of the whole step."""
        raise TypeError("a subclass defines this")


def _check_compiled(eager: torch.Tensor, again: torch.Tensor, compiled: torch.Tensor, compute: Compute) -> None:
    """Raise SnaketuneError if the compiled model's loss differs from the eager one by more than the data type's tolerance.

    Args:
        eager, again: the eager loss, computed twice; a model whose loss isn't reproducible is not checked.
    """
    if eager == again and not abs(compiled - eager) <= TOLERANCE[compute.products] * abs(eager):
        raise SnaketuneError(
            f"training.compile: the compiled model's loss is {compiled.item():.6g}, {eager.item():.6g} before; nothing was "
            "trained. Set it to false"
        )
