"""transformers' Trainer on packed rows: what SFT and DPO share.

The Trainer keeps its loop, schedule, precision and distribution. This adds the order of the rows (a permutation drawn from
seed and epoch, so that a resumed run goes on where it was), checkpoints without pickles, a loss averaged over the whole
optimizer step (tokens or pairs, however they fall into micro-batches and processes), and real throughput.
"""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from snaketune.config.runs import Operation, Training
from snaketune.errors import SnaketuneError
from snaketune.models.batches import collate
from snaketune.models.devices import compute_dtype, device
from snaketune.packing.reader import EqualTokens, PackedRows, epoch_order
from snaketune.stages.attempt import check_files
from snaketune.training.checkpoints import (
    MarkComplete,
    SafeCheckpoints,
    check_finite,
    diverged,
    last_checkpoint,
    remove_incomplete,
)
from snaketune.training.launch import parent_is_gone


class EpochPermutation(torch.utils.data.Sampler[int]):
    """Every item once per epoch, in an order that depends on seed and epoch alone.

    Processes that train together take equally many batches. What lacks for that at the end of an epoch is filled up with the
    index `items`, which stands for a blank item: no row comes twice because there are more GPUs.

    >>> sampler = EpochPermutation(5, seed=0, multiple=4)
    >>> list(sampler)
    [2, 4, 3, 0, 1, 5, 5, 5]
    """

    def __init__(self, items: int, seed: int, multiple: int = 1):
        """Args: multiple: of how many items an epoch is to be, blank ones counted."""
        self.items, self.seed, self.epoch = items, seed, 0
        self.blanks = -items % multiple

    def __len__(self) -> int:
        return self.items + self.blanks

    def set_epoch(self, epoch: int) -> None:
        """Called at the start of each epoch."""
        self.epoch = int(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(self.items, self.seed, self.epoch).tolist() + [self.items] * self.blanks)


class OwnOrder:
    """Mixed into a transformers Trainer: its rows come as EpochPermutation has them, also after a resume."""

    def items_of_an_epoch(self) -> int:
        """Items of the training set, a blank one after them not counted."""
        return len(self.train_dataset)

    def _get_train_sampler(self, train_dataset=None):
        world = self.args.world_size
        together = self.args.per_device_train_batch_size * world if world > 1 else 1
        self.order = EpochPermutation(self.items_of_an_epoch(), self.args.seed, together)
        return self.order


class SetEpoch(TrainerCallback):
    """Tells the order which epoch begins.

    The Trainer does so too, but where it skips what was done before a resume, only the wrapper that skips hears of it.
    """

    def __init__(self, trainer: OwnOrder):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **_):
        """Called by the Trainer."""
        self.trainer.order.set_epoch(int(state.epoch))


class PackedTrainer(OwnOrder, SafeCheckpoints, Trainer):
    """A Trainer whose batches come from `collate`; subclasses say what the loss is and what it is averaged over."""

    # Whether the model's own dropout works in training.
    drops_out = True

    def __init__(self, *, rows: PackedRows, kernel: str, parameters: int, **arguments: Any):
        self.kernel = kernel
        super().__init__(train_dataset=EqualTokens(rows), data_collator=self._collate_items, **arguments)
        self.parameters = parameters
        self.window_tokens = 0
        self.window_started: float | None = None
        self.window_sums: dict[str, float] = {}
        # Losses here are sums over the batch divided by what the whole step holds, so nothing is left to scale.
        self.model_accepts_loss_kwargs = True

    def _collate_items(self, items: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return self.collate([row for rows in items for row in rows], self.kernel)

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
        if self.window_started is None:
            self.window_started = time.monotonic()
        self.window_tokens += inputs["segments"].layout.document_tokens
        # A step may have no items at all: rows in which nothing is supervised teach nothing.
        loss = self.batch_loss(model, inputs) / num_items_in_batch.clamp(min=1)
        if self.args.world_size > 1:
            # Gradients are averaged over processes, and each process holds a part of the step's items.
            loss = loss * self.args.world_size
        return loss

    def _get_num_items_in_batch(self, batch_samples, device):
        total = torch.tensor(sum(self.items(batch) for batch in batch_samples), device=device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    def check_start(self) -> None:
        """Called before the first step of a training, not of a resumed one; raises SnaketuneError if it can't begin so."""

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Add throughput and the window's means to the Trainer's own line."""
        if "loss" in logs and self.window_started is not None:
            seconds = time.monotonic() - self.window_started
            tokens = self.window_tokens * self.args.world_size
            logs["tokens_per_second"] = round(tokens / seconds, 1)
            items = self.window_sums.pop("items", 0)
            logs |= {name: round(total / items, 6) for name, total in self.window_sums.items() if items}
            self.window_tokens, self.window_started, self.window_sums = 0, time.monotonic(), {}
        super().log(logs, *arguments, **keywords)

    def add_to_window(self, **sums: float) -> None:
        """Add to the sums that the next log line shows as means over `items`."""
        for name, value in sums.items():
            self.window_sums[name] = self.window_sums.get(name, 0.0) + value


class Watch(TrainerCallback):
    """Prints a line per log step, and stops a training that nobody waits for."""

    def __init__(self):
        self.started = time.monotonic()
        self.first_step: int | None = None

    def on_step_begin(self, args, state, control, **_):
        """Remember where this process began, for the rate."""
        if self.first_step is None:
            self.first_step, self.started = state.global_step, time.monotonic()

    def on_step_end(self, args, state, control, **_):
        """A requeued job may already wait for this folder."""
        if parent_is_gone():
            raise SnaketuneError("the job that started this training is gone; stopping")

    def on_log(self, args, state, control, logs=None, **_):
        """One line: where it is, how it goes, how long it takes."""
        if not logs or "loss" not in logs:
            return
        if not all(math.isfinite(logs[name]) for name in ("loss", "grad_norm") if name in logs):
            raise diverged(state.global_step, f"loss {logs['loss']}, grad_norm {logs.get('grad_norm')}")
        if not state.is_world_process_zero:
            return
        done = max(state.global_step - (self.first_step or 0), 1)
        left = (time.monotonic() - self.started) / done * (state.max_steps - state.global_step)
        facts = "  ".join(
            f"{name.replace('_', ' ')} {float(logs[name]):.4g}"
            for name in ("loss", "accuracy", "margin", "grad_norm", "learning_rate", "tokens_per_second")
            if name in logs
        )
        print(f"step {state.global_step}/{state.max_steps}  {facts}  {left:.0f} s left", flush=True)


def training_arguments(training: Training, operation: Operation, folder: Path, rows: int) -> TrainingArguments:
    """The Trainer's arguments.

    Raises:
        SnaketuneError: the batch can't be divided among the processes.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if training.batch_rows % (training.micro_batch_rows * world):
        raise SnaketuneError(
            f"training.batch_rows: {training.batch_rows} rows can't be divided into micro-batches of "
            f"{training.micro_batch_rows} on {world} GPUs; expected a multiple of {training.micro_batch_rows * world}"
        )
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.micro_batch_rows,
        gradient_accumulation_steps=training.batch_rows // (training.micro_batch_rows * world),
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.schedule,
        warmup_steps=math.ceil(training.warmup_fraction * training.epochs * math.ceil(rows / training.batch_rows)),
        optim=training.optimizer,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        max_grad_norm=training.max_grad_norm,
        gradient_checkpointing=training.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if training.gradient_checkpointing else None,
        bf16=compute_dtype(training.precision) == torch.bfloat16,
        use_cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        seed=training.seed,
        logging_steps=operation.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=operation.checkpoint_steps,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
        # EpochPermutation fills up; accelerate would take rows from the epoch's beginning again.
        accelerator_config={"even_batches": False, "use_seedable_sampler": False},
    )


def fit(trainer: Trainer, checkpoints: Path) -> dict[str, Any]:
    """Train, from the last checkpoint where there is one.

    Returns:
        What differs from run to run, for run.json: history, device, kernel, throughput.
    Raises:
        SnaketuneError: the training diverged, or a checkpoint doesn't fit.
    """
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MarkComplete())
    trainer.add_callback(Watch())
    trainer.add_callback(SetEpoch(trainer))
    if trainer.is_world_process_zero():
        remove_incomplete(checkpoints)
    trainer.accelerator.wait_for_everyone()
    # The base has been read: from here on checkpoints hold what came of it.
    check_files(checkpoints.parent)
    last = last_checkpoint(checkpoints)
    if last is not None:
        print(f"resuming from {last}", flush=True)
    elif isinstance(trainer, PackedTrainer):
        trainer.check_start()
    mean_loss = trainer.train(resume_from_checkpoint=str(last) if last else None).training_loss
    # The log may have looked for the last time before it happened.
    if not math.isfinite(mean_loss):
        raise diverged(trainer.state.global_step, f"the mean loss of the steps is {mean_loss}")
    check_finite(trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    facts = {"history": history, **_where(trainer.args.world_size)}
    rates = sorted(entry["tokens_per_second"] for entry in history[1:] or history if "tokens_per_second" in entry)
    if rates:
        # Forward and backward of every parameter; with frozen weights, no gradients of those. Attention isn't counted.
        model = trainer.accelerator.unwrap_model(trainer.model)
        per_parameter = 6 if all(p.requires_grad for p in model.parameters()) else 4
        median = rates[len(rates) // 2]
        facts |= {
            "tokens_per_second_median": median,
            "flops_per_parameter_and_token": per_parameter,
            "model_tflops_per_second": round(per_parameter * trainer.parameters * median / 1e12, 4),
        }
    return facts


def _where(processes: int) -> dict[str, Any]:
    where = device()
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
