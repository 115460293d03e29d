"""Checks of a training's gradients: of packed rows against their documents alone, and of micro-batches against one batch."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from snaketune.diagnostics.checks.check import Check, judged
from snaketune.diagnostics.checks.sequences import documents_of, token_losses
from snaketune.engine.model.attention import use_kernel, use_own_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import inner_model, without_dropout
from snaketune.engine.model.logit_differences import TOLERANCE
from snaketune.engine.model.logprobs import summed_losses
from snaketune.training.pipeline import ready_trainer
from snaketune.training.prepared import PreparedTraining

Gradients = dict[str, torch.Tensor]
PACKED, MICRO_BATCHES = "packed = alone", "micro-batch 1 = all"
# Settings that let the first step of two trainings differ in nothing but its micro-batches; clipping would hide another scale.
PLAIN_STEP = {"schedule": "constant", "schedule_options": {}, "warmup_fraction": 0.0, "optimizer": "adamw_torch"}
PLAIN_STEP |= {"max_grad_norm": 0.0, "compile": False, "neftune_noise_alpha": None, "average": None}


def packed_equals_alone(model: torch.nn.Module, rows: list[dict[str, Any]], compute: Compute) -> Check:
    """Compare summed loss and gradients of rows, by the training's kernel, with those of each of their documents alone.

    Args:
        model: one that has passed the self-test with the kernel of `compute`, with its adapters.
    """
    model.eval()
    packed = alone = 0.0
    use_kernel(inner_model(model), compute.kernel)
    for row in rows:
        batch = collate([row], compute.kernel).to(compute.device)
        with compute.autocast():
            loss = summed_losses(model, batch)
        loss.backward()
        packed += loss.item()
    of_packed = take_gradients(model)
    use_own_attention(inner_model(model))
    for sequence in (sequence for row in rows for document in documents_of(row) for sequence in document):
        if len(sequence.targets):
            loss = token_losses(model, sequence, compute.autocast()).sum()
            loss.backward()
            alone += loss.item()
    of_alone = take_gradients(model)
    use_kernel(inner_model(model), compute.kernel)
    losses = abs(packed - alone) / max(abs(alone), 1e-9)
    gradients = relative_difference(of_packed, of_alone)
    compares = f"loss and gradients of {len(rows)} rows, {compute.kernel}, {compute.about()['dtype']}"
    apart = f"losses differ by {losses:.1e}, gradients by {gradients:.1e}"
    return judged(PACKED, compares, max(losses, gradients), TOLERANCE[compute.dtype], reason=apart)


def take_gradients(model: torch.nn.Module) -> Gradients:
    """The gradients of all trained parameters, in host memory; the model has none afterwards."""
    taken = {name: p.grad.detach().float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def relative_difference(one: Gradients, other: Gradients) -> float:
    """The norm of the difference of two gradients, relative to that of the second; a missing tensor is 0."""
    names = {*one, *other}
    zero = torch.zeros(())
    apart = sum((one.get(name, zero) - other.get(name, zero)).double().square().sum().item() for name in names)
    size = sum(gradient.double().square().sum().item() for gradient in other.values())
    return (apart / size) ** 0.5 if size else float("nan")


class _Taken(Exception):
    """The gradients of the first step are there."""


class _FirstStep(TrainerCallback):
    """Takes the gradients of the first step, before the optimizer uses them."""

    gradients: Gradients

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients = take_gradients(model)
        raise _Taken


@contextmanager
def first_step_trainer(training: PreparedTraining, rows: int, micro_batch: int) -> Iterator[Any]:
    """Yield the training's own trainer, whose steps are of so many rows in such micro-batches."""
    run = training.run
    learning = run.spec.training.model_copy(update=PLAIN_STEP | {"batch_rows": rows})
    operation = run.operation.model_copy(update={"micro_batch_rows": micro_batch})
    run = replace(run, spec=run.spec.model_copy(update={"training": learning}), operation=operation)
    with ready_trainer(replace(training, run=run)) as (trainer, _):
        trainer.args.save_strategy, trainer.args.logging_strategy = "no", "no"
        trainer.args.logging_first_step = False
        yield trainer


def step_gradients(training: PreparedTraining, rows: int, micro_batch: int) -> tuple[Gradients, Compute]:
    """The gradients of the first step of a training, by its own trainer, and how they were computed."""
    with first_step_trainer(training, rows, micro_batch) as trainer:
        first = _FirstStep()
        trainer.add_callback(first)
        with without_dropout(trainer.model), suppress(_Taken):
            trainer.train()
        return first.gradients, trainer.compute


def micro_batches_equal(training: PreparedTraining, rows: int) -> Check:
    """Compare the gradients of a step of `rows` rows in micro-batches of one with those of the same rows at once."""
    rows = min(rows, len(training.rows))
    (one, _), (all_at_once, compute) = (step_gradients(training, rows, size) for size in (1, rows))
    figure = relative_difference(one, all_at_once)
    compares = f"gradients of a step of {rows} rows in micro-batches of 1 and of {rows}"
    return judged(MICRO_BATCHES, compares, figure, TOLERANCE[compute.products])
