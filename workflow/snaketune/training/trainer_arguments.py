"""The arguments of transformers' Trainer, for a training run."""

import math
from typing import Any

import torch
from transformers import TrainingArguments

from snaketune.config.optimizers import MUON, OPTIMIZERS, missing_package
from snaketune.config.training_runs import Training
from snaketune.engine.fsdp import world_size
from snaketune.errors import SnaketuneError
from snaketune.training.prepared import TrainingRun


def training_arguments(run: TrainingRun, items: int) -> TrainingArguments:
    """Return the Trainer's arguments. Args: items: items per epoch. Raises: see `step_arguments`."""
    training, operation = run.spec.training, run.operation
    on_cpu, deepspeed = run.compute.device.type == "cpu", operation.launch == "deepspeed"
    return TrainingArguments(
        output_dir=str(run.checkpoints),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=operation.micro_batch_rows,
        gradient_accumulation_steps=training.batch_rows // (operation.micro_batch_rows * world_size()),
        **step_arguments(training, items, run.compute.device),
        max_grad_norm=training.max_grad_norm,
        # Where it is off it isn't named: transformers 5.23 warns of this name, and 5.17 knows no other.
        **(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
            if operation.gradient_checkpointing
            else {}
        ),
        bf16=run.compute.dtype == torch.bfloat16,
        # With use_cpu accelerate would silently not use DeepSpeed; with the gloo backend it does.
        use_cpu=on_cpu and not deepspeed,
        ddp_backend="gloo" if on_cpu and deepspeed else None,
        seed=training.seed,
        logging_steps=operation.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=operation.checkpoint_steps,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        # EpochPermutation fills the epoch with blank items; accelerate would repeat rows from its start.
        accelerator_config={"even_batches": False, "use_seedable_sampler": False},
        # `engine.data_order` uses a thread instead.
        dataloader_num_workers=0,
        dataloader_pin_memory=run.compute.device.type == "cuda",
    )


def step_arguments(training: Training, items: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of optimizer and learning-rate schedule.

    Raises:
        SnaketuneError: the optimizer's package isn't installed, or warm-up and decay are longer than the training:
            transformers would start the decay part-way down, or divide by zero remaining steps.
    """
    if missing := missing_package(training.optimizer):
        raise SnaketuneError(f"training.optimizer: {missing}")
    if OPTIMIZERS[training.optimizer].paged and device.type != "cuda":
        print(f"optimizer: on {device.type} {training.optimizer} isn't paged; its updates are the same", flush=True)
    options, epoch_steps = training.schedule_options, math.ceil(items / training.batch_rows)
    steps = math.ceil(training.epochs * epoch_steps)
    # The schedule `constant` ignores it.
    warmup = math.ceil(training.warmup_fraction * training.epochs * epoch_steps)
    needed = warmup + options.get("num_stable_steps", 0) + options.get("num_decay_steps", 0)
    if needed > steps:
        raise SnaketuneError(
            f"training.schedule_options: warm-up and {options} take {needed} steps, and the training has {steps}; shorten them"
        )
    if training.schedule == "polynomial" and warmup == steps:
        raise SnaketuneError(
            f"training.warmup_fraction: {training.warmup_fraction:g} of {steps} steps leaves none to schedule polynomial; "
            "lower it"
        )
    return {
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.schedule,
        "lr_scheduler_kwargs": dict(options) or None,
        "warmup_steps": warmup,
        # Of muon, the part for what isn't a matrix (`engine.optimizers`).
        "optim": "adamw_torch_fused" if training.optimizer == MUON else training.optimizer,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
    }
