"""The Trainer's arguments for the optimizer and the learning-rate schedule."""

import math
from typing import Any

import torch

from snaketune.config.optimizers import OPTIMIZERS, missing_package
from snaketune.config.training_runs import Training
from snaketune.errors import SnaketuneError


def step_arguments(training: Training, items: int, device: torch.device) -> dict[str, Any]:
    """Return keyword arguments of TrainingArguments for optimizer and schedule.

    Args:
        items: items per epoch.
    Raises:
        SnaketuneError: the optimizer's package isn't installed, or the schedule is longer than the training.
    """
    if missing := missing_package(training.optimizer):
        raise SnaketuneError(f"training.optimizer: {missing}")
    if OPTIMIZERS[training.optimizer].paged and device.type != "cuda":
        print(f"optimizer: on {device.type} {training.optimizer} isn't paged; its updates are the same", flush=True)
    steps = math.ceil(training.epochs * math.ceil(items / training.batch_rows))
    # The schedule `constant` ignores it.
    warmup = math.ceil(training.warmup_fraction * training.epochs * math.ceil(items / training.batch_rows))
    _check_length(training, steps, warmup)
    return {
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.schedule,
        "lr_scheduler_kwargs": dict(training.schedule_options) or None,
        "warmup_steps": warmup,
        "optim": training.optimizer,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
    }


def _check_length(training: Training, steps: int, warmup: int) -> None:
    """Raise SnaketuneError if warm-up and decay are longer than the training.

    transformers would start the decay part-way down, or divide by zero remaining steps.
    """
    options = training.schedule_options
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
