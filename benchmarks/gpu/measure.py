"""Training steps of one shape: seconds, real tokens/s or pairs/s, share of the device's peak, memory.

Steps are those of our trainer, from a batch's rows to the changed weights; where what it needs besides torch and transformers
isn't installed (pydantic, for one), those of a plain loop over the same engine, without the share of the peak, which the
trainer's meter counts; the entry says which. DPO trains adapters on pairs whose prompts are computed once, with a reference
that is known beforehand.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.clock import Clock, packed_counts
from benchmarks.gpu.rows import MadeRows, make_pairs, make_rows, pair_rows
from benchmarks.gpu.shapes import Shape, add_adapters, make_model

from snaketune.engine.model.batches import collate
from snaketune.engine.model.compiling import compile_layers
from snaketune.engine.model.devices import Compute, deterministic_algorithms
from snaketune.engine.model.logprobs import pair_logprobs, summed_losses, token_losses
from snaketune.engine.model.machine import reset_peak_memory
from snaketune.engine.model.selftest import self_test

NEEDED_BY_TRAINER = ("pydantic", "accelerate", "safetensors", "xxhash")
LEARNING_RATE = 1e-5
BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Training steps to measure: of a shape, on rows of which `micro_rows` are computed together."""

    shape: Shape
    rows: MadeRows
    compiled: bool
    compute: Compute
    micro_rows: int
    clock: Clock


def measure(
    shape: Shape, compute: Compute, warm_up: int, steps: int, *, deterministic: bool = False, compiled: bool = True
) -> dict[str, Any]:
    """Measure SFT with as many rows as fit, halving their initial number."""

    def run(micro_rows: int) -> dict[str, Any]:
        rows = make_rows(shape.batch_rows * (warm_up + steps), shape.length, shape.vocabulary)
        clock = Clock(warm_up, steps, compute.device)
        return _measured(
            Steps(shape=shape, rows=rows, compiled=compiled, compute=compute, micro_rows=micro_rows, clock=clock)
        )

    with deterministic_algorithms(deterministic):
        return as_many_as_fit(shape.micro_rows, run) | {"row_length": shape.length}


def preferences(shape: Shape, proportion: str, compute: Compute, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure DPO with as many rows as fit, halving their initial number."""
    compiled = compute.device.type == "cuda"

    def run(micro_rows: int) -> dict[str, Any]:
        pairs = make_pairs(shape.batch_rows * (warm_up + steps), shape.length, shape.vocabulary, proportion)
        rows, clock = pair_rows(pairs, shape.length), Clock(warm_up, steps, compute.device)
        return _measured(
            Steps(shape=shape, rows=rows, compiled=compiled, compute=compute, micro_rows=micro_rows, clock=clock)
        )

    return as_many_as_fit(shape.micro_rows, run) | {"compiled": compiled}


def as_many_as_fit(rows: int, run: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Call `run` with a number of rows, halved until they fit; return its result with that number and its status."""
    halved = []
    while True:
        try:
            found = run(rows)
            return {
                "status": "measured",
                "rows": rows,
                **({"out_of_memory_at_rows": halved} if halved else {}),
                **found,
            }
        except torch.OutOfMemoryError:
            halved.append(rows)
            if rows == 1:
                return {"status": "failed", "why": "out of memory with one row", "out_of_memory_at_rows": halved}
        # Here, for what an exception refers to is alive as long as it is handled, and `run` begins with freeing memory.
        rows //= 2


def peak_memory(compute: Compute) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    return {"peak_memory_gb": torch.cuda.max_memory_allocated(compute.device) / 1e9 if on_cuda else None}


def _measured(steps: Steps) -> dict[str, Any]:
    shape, compute = steps.shape, steps.compute
    reset_peak_memory(compute.device)
    model = make_model(shape, compute)
    parameters = model.num_parameters()
    tested = self_test(model, [], compute, training=True)
    if shape.rank:
        model = add_adapters(model, shape.rank)
    torch._dynamo.reset()
    lacking = [name for name in NEEDED_BY_TRAINER if find_spec(name) is None]
    by_trainer = "DpoTrainer" if bool(steps.rows.pairs) else "SftTrainer"
    facts = (_loop if lacking else _trainer)(model, steps)
    return steps.clock.found() | {
        **facts,
        "driven_by": f"a plain loop (no {', '.join(lacking)} for the trainer)" if lacking else by_trainer,
        "parameters": parameters,
        "card": torch.cuda.get_device_name(compute.device) if compute.device.type == "cuda" else "",
        "kernel": compute.kernel,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "self_test_share": tested.share,
        **peak_memory(compute),
    }


def _trainer(model: torch.nn.Module, steps: Steps) -> dict[str, Any]:
    """Run training steps as `training.pipeline` does; return the share of the peak, and of SFT the expected memory."""
    from benchmarks.jobs import started

    from snaketune.config.base_models import Scratch
    from snaketune.config.lora import Lora
    from snaketune.config.operation import Execution
    from snaketune.config.training_runs import Learning
    from snaketune.engine.dpo import DpoTrainer
    from snaketune.engine.model.forward import inner_model
    from snaketune.engine.sft import SftTrainer
    from snaketune.stages.specs import DpoSpec, SftSpec
    from snaketune.training.autotune.machine_check import check_machine
    from snaketune.training.pipeline import fit, make_trainer
    from snaketune.training.prepared import PreparedTraining, TrainingRun
    from snaketune.training.prepared_dpo import preference_settings
    from snaketune.training.prepared_sft import sft_loss

    shape, rows, compute, clock = steps.shape, steps.rows, steps.compute, steps.clock
    settings = Learning(batch_rows=shape.batch_rows, learning_rate=LEARNING_RATE, compile=steps.compiled)
    operation = Execution(checkpoint_steps=10**6, micro_batch_rows=steps.micro_rows, gradient_checkpointing=False)
    of_pairs, expected = bool(rows.pairs), {}
    if of_pairs:
        spec = DpoSpec(beta=BETA, training=settings, lora=None, quantization=None, trust_remote_code=False)
    else:
        # The model is made already, so this is only said.
        base = Scratch(hidden_size=2, intermediate_size=1, layers=1, heads=1)
        spec = SftSpec(base=base, training=settings, lora=shape.rank and Lora(rank=shape.rank), quantization=None)
        estimate = check_machine(spec, operation, compute, inner_model(model).config, rows).estimate
        expected = {"expected_memory_gb": estimate.expected / 1e9} if estimate and estimate.expected else {}

    def counts(batch: dict[str, Any]) -> dict[str, int]:
        placed, flops = batch["segments"].layout, trainer.meter.flops
        of_batch = flops.batch(placed.prefix_lengths[placed.documents], placed.lengths[placed.documents])
        # Only what predicts supervised tokens is projected to the vocabulary.
        computed = flops.computed(of_batch, placed.document_tokens, len(batch["sources"]))
        return packed_counts(batch) | {"flops": of_batch, "flops_computed": computed}

    with tempfile.TemporaryDirectory() as name:
        run = TrainingRun(spec=spec, operation=operation, work=started(name), compute=compute)
        timed = clock.timing(DpoTrainer if of_pairs else SftTrainer, counts)
        loss = {"settings": preference_settings(spec)} if of_pairs else sft_loss(spec)
        prepared = PreparedTraining(trainer_class=timed, rows=rows, run=run, initial=None, loss=loss)
        trainer = make_trainer(prepared, model, compute)
        if of_pairs:
            # The reference is made up, so it differs from the policy.
            trainer.check_start = lambda: None
        fit(trainer, run)
    found, peak = clock.found(), trainer.meter.peak
    return expected | {
        "mfu": found["flops_per_s"] / peak.flops_per_second,
        "mfu_computed": found["flops_computed_per_s"] / peak.flops_per_second,
        "flops_counted": str(trainer.meter.flops),
        "peak_tflops_per_s": peak.flops_per_second / 1e12,
        "peak": peak.source,
    }


def _loop(model: torch.nn.Module, steps: Steps) -> dict[str, Any]:
    rows, compute, micro_rows, clock = steps.rows, steps.compute, steps.micro_rows, steps.clock
    model.train()
    update = optimizer_step(model, compute)
    if steps.compiled:
        compile_layers(model, compute, checkpointing=False)
    order = np.random.default_rng(0).permutation(len(rows))
    for at in range(0, len(order), micro_rows):
        batch = collate([rows[row] for row in order[at : at + micro_rows]], compute.kernel, rows.longest[0])
        clock.count(**packed_counts(batch))
        batch = batch.to(compute.device)
        with compute.autocast():
            if bool(rows.pairs):
                sums_P2, _ = pair_logprobs(token_losses(model, batch), batch)
                loss = -F.logsigmoid(BETA * (sums_P2[:, 0] - sums_P2[:, 1])).mean()
            else:
                loss = summed_losses(model, batch) / len(batch["targets"])
        loss.backward()
        if (at + micro_rows) % steps.shape.batch_rows == 0:
            update()
            if clock.step_ended():
                return {}
    raise AssertionError("too few rows were made")


def optimizer_step(model: torch.nn.Module, compute: Compute) -> Callable[[], None]:
    """Return what a plain loop does with the gradients of a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=compute.device.type == "cuda")

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update
