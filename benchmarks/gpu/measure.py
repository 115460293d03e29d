"""Training steps of one shape: seconds, real tokens/s or pairs/s, share of the device's peak, memory.

Steps are those of our trainer, from a batch's rows to the changed weights; where what it needs besides torch and transformers
isn't installed (pydantic, for one), those of a plain loop over the same engine, and the entry says which. DPO trains adapters
on pairs whose prompts are computed once, with a reference that is known beforehand.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.clock import Clock
from benchmarks.flops import attention_flops, packed_counts, step_flops
from benchmarks.gpu.expected import CARDS, expected
from benchmarks.gpu.rows import MadePairRows, MadeRows, make_pairs, make_rows, pair_rows
from benchmarks.gpu.shapes import Shape, add_adapters, make_model

from snaketune.models.batches import collate
from snaketune.models.compiling import compile_layers
from snaketune.models.device_speed import Peak
from snaketune.models.devices import Compute, deterministic_algorithms
from snaketune.models.forward import logits_at, packed_inputs
from snaketune.models.logprobs import pair_logprobs, summed_losses, token_losses
from snaketune.models.machine import reset_peak_memory
from snaketune.models.selftest import self_test

NEEDED_BY_TRAINER = ("pydantic", "accelerate", "safetensors", "xxhash")
LEARNING_RATE = 1e-5
BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class Variant:
    compiled: bool = True
    checkpointing: bool = False
    chunked: bool = True
    deterministic: bool = False
    offloading: bool = False


BASE = "compiled, chunked loss"
# One change at a time.
VARIANTS = {
    BASE: Variant(),
    "not compiled": Variant(compiled=False),
    "gradient checkpointing": Variant(checkpointing=True),
    "loss not chunked": Variant(chunked=False),
    "deterministic": Variant(deterministic=True),
    "activations offloaded": Variant(offloading=True),
}


def measure(shape: Shape, variant: Variant, compute: Compute, peak: Peak, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure SFT with as many rows as fit, halving their initial number."""

    def run(micro_rows: int) -> dict[str, Any]:
        rows = make_rows(shape.batch_rows * (warm_up + steps), shape.length, shape.vocabulary)
        return _steps(shape, rows, variant, compute, micro_rows, Clock(warm_up, steps, compute.device))

    with deterministic_algorithms(variant.deterministic):
        found = as_many_as_fit(shape.micro_rows, run)
    if found["status"] == "failed":
        return found
    frozen, tokens = shape.rank is not None, found["tokens"]
    # An embedding that isn't tied to the head has no matmul; adapters are 1% of the rest and not counted.
    matrix = shape.vocabulary * shape.model["hidden_size"]
    multiplied = found["parameters"] - (0 if shape.model["tie_word_embeddings"] else matrix)
    attention = attention_flops(found["visible_pairs"], **shape.attention)
    flops = step_flops(multiplied, tokens, attention, frozen=frozen)
    # Only what is supervised is projected to the vocabulary.
    computed = flops - step_flops(matrix, tokens - found["supervised"], 0, frozen=frozen)
    card = next((card for card in CARDS if card in found["card"]), None)
    return {
        **({"expected_step_s": expected(shape, found["rows"], card).total} if card else {}),
        "mfu": flops / found["seconds"] / peak.flops_per_second,
        "mfu_computed": computed / found["seconds"] / peak.flops_per_second,
        "flops": f"{4 if frozen else 6} per parameter that a token is multiplied with, and attention over visible pairs",
        "tflops_per_s": flops / found["seconds"] / 1e12,
        "peak_tflops_per_s": peak.flops_per_second / 1e12,
        "peak": peak.source,
        "row_length": shape.length,
        **found,
    }


def preferences(shape: Shape, proportion: str, compute: Compute, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure DPO with as many rows as fit, halving their initial number."""
    variant = Variant(compiled=compute.device.type == "cuda")

    def run(micro_rows: int) -> dict[str, Any]:
        pairs = make_pairs(shape.batch_rows * (warm_up + steps), shape.length, shape.vocabulary, proportion)
        clock = Clock(warm_up, steps, compute.device)
        return _steps(shape, pair_rows(pairs, shape.length), variant, compute, micro_rows, clock)

    return as_many_as_fit(shape.micro_rows, run) | {"compiled": variant.compiled}


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


def _steps(
    shape: Shape, rows: MadeRows, variant: Variant, compute: Compute, micro_rows: int, clock: Clock
) -> dict[str, Any]:
    reset_peak_memory(compute.device)
    model = make_model(shape, compute)
    parameters = model.num_parameters()
    tested = self_test(model, [], compute, training=True)
    if shape.rank:
        model = add_adapters(model, shape.rank)
        if variant.checkpointing:
            model.enable_input_require_grads()
    torch._dynamo.reset()
    lacking = [name for name in NEEDED_BY_TRAINER if find_spec(name) is None]
    by_trainer = "DpoTrainer" if isinstance(rows, MadePairRows) else "SftTrainer"
    facts = (_loop if lacking else _trainer)(model, rows, variant, compute, (micro_rows, shape.batch_rows), clock)
    return clock.found() | {
        **facts,
        "driven_by": f"a plain loop (no {', '.join(lacking)} for the trainer)" if lacking else by_trainer,
        "parameters": parameters,
        "card": torch.cuda.get_device_name(compute.device) if compute.device.type == "cuda" else "",
        "kernel": compute.kernel,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "self_test_share": tested.share,
        **peak_memory(compute),
    }


def _counts(batch: dict[str, Any]) -> dict[str, int]:
    placed = batch["segments"].layout
    if pairs := len(placed.completions) // 2:
        return {"tokens": placed.document_tokens, "supervised": len(batch["targets"]), "pairs": pairs}
    return packed_counts(batch)


def _trainer(
    model: torch.nn.Module, rows: MadeRows, variant: Variant, compute: Compute, sizes: tuple[int, int], clock: Clock
) -> dict[str, Any]:
    """Run training steps as `training.loop.pipeline` does; return the expected memory, of SFT.

    Args:
        sizes: rows of a micro-batch, and of a step.
    """
    from benchmarks.jobs import started

    from snaketune.config.base_models import Scratch
    from snaketune.config.lora import Lora
    from snaketune.config.operation import Execution
    from snaketune.config.training_runs import Learning
    from snaketune.models.forward import inner_model
    from snaketune.stages.specs import DpoSpec, SftSpec
    from snaketune.training.autotune.machine_check import check_machine
    from snaketune.training.loop.pipeline import fit
    from snaketune.training.loop.sft_trainer import SftTrainer
    from snaketune.training.loop.trainer import TrainingRun
    from snaketune.training.preference.dpo_trainer import DpoTrainer

    micro_rows, batch_rows = sizes
    settings = Learning(batch_rows=batch_rows, learning_rate=LEARNING_RATE, compile=variant.compiled)
    operation = Execution(
        checkpoint_steps=10**6,
        micro_batch_rows=micro_rows,
        gradient_checkpointing=variant.checkpointing,
        activation_offloading=variant.offloading,
    )
    of_pairs, found = isinstance(rows, MadePairRows), {}
    if of_pairs:
        spec = DpoSpec(beta=BETA, training=settings, lora=None, quantization=None, trust_remote_code=False)
    else:
        # The model is made already, so this is only said.
        base = Scratch(hidden_size=2, intermediate_size=1, layers=1, heads=1)
        rank = next((config.r for config in getattr(model, "peft_config", {}).values()), None)
        spec = SftSpec(base=base, training=settings, lora=rank and Lora(rank=rank), quantization=None)
        estimate = check_machine(spec, operation, compute, inner_model(model).config, rows).estimate
        found = {"expected_memory_gb": estimate.expected / 1e9} if estimate and estimate.expected else {}
    with tempfile.TemporaryDirectory() as name:
        run = TrainingRun(spec=spec, operation=operation, work=started(name), compute=compute)
        trainer = clock.timing(DpoTrainer if of_pairs else SftTrainer, _counts)(model=model, rows=rows, run=run)
        if of_pairs:
            # The reference is made up, so it differs from the policy.
            trainer.check_start = lambda: None
        else:
            trainer.batch_loss = lambda model, batch, totals: _sft_loss(model, batch, variant) / totals[0]
        fit(trainer)
    return found


def _loop(
    model: torch.nn.Module, rows: MadeRows, variant: Variant, compute: Compute, sizes: tuple[int, int], clock: Clock
) -> dict[str, Any]:
    micro_rows, batch_rows = sizes
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    update = optimizer_step(model, compute)
    if variant.compiled:
        compile_layers(model, compute, checkpointing=variant.checkpointing)
    order = np.random.default_rng(0).permutation(len(rows))
    for at in range(0, len(order), micro_rows):
        batch = collate([rows[row] for row in order[at : at + micro_rows]], compute.kernel, rows.longest[0])
        clock.count(**_counts(batch))
        batch = batch.to(compute.device)
        with compute.autocast():
            if isinstance(rows, MadePairRows):
                sums_P2, _ = pair_logprobs(token_losses(model, batch), batch)
                loss = -F.logsigmoid(BETA * (sums_P2[:, 0] - sums_P2[:, 1])).mean()
            else:
                loss = _sft_loss(model, batch, variant) / len(batch["targets"])
        loss.backward()
        if (at + micro_rows) % batch_rows == 0:
            update()
            if clock.step_ended():
                return {}
    raise AssertionError("too few rows were made")


def _sft_loss(model: torch.nn.Module, batch: dict[str, Any], variant: Variant) -> torch.Tensor:
    """Return the summed loss of a batch's supervised tokens, in chunks or from all logits together."""
    if variant.chunked:
        return summed_losses(model, batch)
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0][batch["source_rows"]]
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="sum")


def optimizer_step(model: torch.nn.Module, compute: Compute) -> Callable[[], None]:
    """Return what a plain loop does with the gradients of a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=compute.device.type == "cuda")

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update
