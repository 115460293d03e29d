"""Training steps of one shape in one variant: seconds, real tokens/s, share of the device's peak, memory.

Steps are those of our trainer, from a batch's rows to the changed weights; where what it needs besides torch and transformers
isn't installed (pydantic, for one), those of a plain loop over the same engine, and the entry says which.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.flops import attention_flops, step_flops, visible_pairs
from benchmarks.gpu.engine import batch_loss
from benchmarks.gpu.expected import CARDS, expected
from benchmarks.gpu.shapes import MadeRows, Shape, add_adapters, make_model, make_rows

from snaketune.models.batches import collate
from snaketune.models.compiling import compile_layers
from snaketune.models.device_speed import Peak
from snaketune.models.devices import Compute, deterministic_algorithms
from snaketune.models.selftest import self_test

NEEDED_BY_TRAINER = ("pydantic", "accelerate", "safetensors", "xxhash")
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The switches of a variant."""

    compiled: bool = True
    checkpointing: bool = False
    chunked: bool = True
    deterministic: bool = False


BASE = "compiled, chunked loss"
# One change at a time.
VARIANTS = {
    BASE: Variant(),
    "not compiled": Variant(compiled=False),
    "gradient checkpointing": Variant(checkpointing=True),
    "loss not chunked": Variant(chunked=False),
    "deterministic": Variant(deterministic=True),
}


class Marks:
    """The times of the warm-up and the last step, and the work between them."""

    def __init__(self, warm_up: int, steps: int, device: torch.device):
        self.warm_up, self.steps, self.device = warm_up, steps, device
        self.done = 0
        self.first = self.begin = self.end = 0.0
        self.graphs = [0, 0]
        self.started = time.perf_counter()
        self.sums: dict[str, int] = {}

    def count(self, **sums: int) -> None:
        """Count the work of the step that begins."""
        if self.warm_up <= self.done < self.warm_up + self.steps:
            for name, value in sums.items():
                self.sums[name] = self.sums.get(name, 0) + value

    def step_ended(self) -> bool:
        """Return whether this step was the last."""
        self.done += 1
        if self.done in (1, self.warm_up, self.warm_up + self.steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            self.first = self.first or now - self.started
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            if self.done <= self.warm_up:
                self.begin, self.graphs[0] = now, graphs
            self.end, self.graphs[1] = now, graphs
        return self.done >= self.warm_up + self.steps

    def found(self) -> dict[str, Any]:
        seconds = self.end - self.begin
        return self.sums | {
            "steps": self.steps,
            "seconds": seconds,
            "step_s": seconds / self.steps,
            "tokens_per_s": self.sums["tokens"] / seconds,
            "first_step_s": self.first,
            # 0, where shapes are static.
            "graphs_compiled_after_warm_up": self.graphs[1] - self.graphs[0],
        }


def measure(shape: Shape, variant: Variant, compute: Compute, peak: Peak, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure a shape with as many rows as fit, halving its initial number."""
    with deterministic_algorithms(variant.deterministic):
        found = as_many_as_fit(
            shape.micro_rows, lambda micro_rows: _steps(shape, variant, compute, micro_rows, warm_up, steps)
        )
    if found["status"] == "failed":
        return found
    attention = attention_flops(found["pairs"], **shape.attention)
    frozen, tokens = shape.rank is not None, found["tokens"]
    # An embedding that isn't tied to the head has no matmul; adapters are 1% of the rest and not counted.
    matrix = shape.model["vocab_size"] * shape.model["hidden_size"]
    multiplied = found["parameters"] - (0 if shape.model["tie_word_embeddings"] else matrix)
    flops = step_flops(multiplied, tokens, attention, frozen=frozen)
    # Only what is supervised is projected to the vocabulary.
    computed = flops - step_flops(matrix, tokens - found["supervised"], 0, frozen=frozen)
    card = next((card for card in CARDS if card in found["card"]), None)
    by_arithmetic = {"expected_step_s": expected(shape, found["rows"], card).total} if card else {}
    return by_arithmetic | {
        "mfu": flops / found["seconds"] / peak.flops_per_second,
        "mfu_computed": computed / found["seconds"] / peak.flops_per_second,
        "flops": f"{4 if frozen else 6} per parameter that a token is multiplied with, and attention over visible pairs",
        "tflops_per_s": flops / found["seconds"] / 1e12,
        "peak_tflops_per_s": peak.flops_per_second / 1e12,
        "peak": peak.source,
        "row_length": shape.length,
        **found,
    }


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
        # Here, for what an exception refers to is alive as long as it is handled.
        rows //= 2
        free_memory()


def free_memory() -> None:
    """Free memory that nothing references."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _steps(
    shape: Shape, variant: Variant, compute: Compute, micro_rows: int, warm_up: int, steps: int
) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(compute.device)
    model = make_model(shape, compute)
    parameters = model.num_parameters()
    tested = self_test(model, [], compute, training=True)
    if shape.rank:
        model = add_adapters(model, shape.rank)
        if variant.checkpointing:
            model.enable_input_require_grads()
    torch._dynamo.reset()
    rows = make_rows(shape.batch_rows * (warm_up + steps), shape.length, shape.model["vocab_size"]).rows
    marks = Marks(warm_up, steps, compute.device)
    lacking = [name for name in NEEDED_BY_TRAINER if find_spec(name) is None]
    run = _loop if lacking else _trainer
    facts = run(model, rows, variant, compute, (micro_rows, shape.batch_rows), marks)
    return marks.found() | {
        **facts,
        "driven_by": f"a plain loop (no {', '.join(lacking)} for the trainer)" if lacking else "SftTrainer",
        "parameters": parameters,
        "card": torch.cuda.get_device_name(compute.device) if on_cuda else "",
        "kernel": compute.kernel,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "self_test_share": tested.share,
        "peak_memory_gb": torch.cuda.max_memory_allocated(compute.device) / 1e9 if on_cuda else None,
    }


def _count(marks: Marks, batch: dict[str, Any], supervised: int) -> None:
    placed = batch["segments"].layout
    lengths = placed.lengths[placed.documents]
    marks.count(tokens=int(lengths.sum()), supervised=supervised, pairs=visible_pairs(lengths))


def _trainer(
    model: torch.nn.Module, rows: MadeRows, variant: Variant, compute: Compute, sizes: tuple[int, int], marks: Marks
) -> dict[str, Any]:
    """Run training steps as `training.loop.pipeline` does; return them and the expected memory.

    Args:
        sizes: rows of a micro-batch, and of a step.
    """
    from transformers import TrainerCallback

    from snaketune.config.operation import Execution
    from snaketune.config.training_runs import Learning, Lora, Scratch
    from snaketune.models.forward import inner_model
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.specs import SftSpec
    from snaketune.training.autotune.machine_check import check_machine
    from snaketune.training.loop.pipeline import fit
    from snaketune.training.loop.sft_trainer import SftTrainer
    from snaketune.training.loop.trainer import TrainingRun

    class Measured(SftTrainer):
        def training_step(self, model, inputs, *others):
            _count(marks, inputs, len(inputs["targets"]))
            return super().training_step(model, inputs, *others)

        def batch_loss(self, model, batch, totals):
            return batch_loss(model, batch, chunked=variant.chunked) / totals[0]

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= marks.step_ended()

    micro_rows, batch_rows = sizes
    settings = Learning(batch_rows=batch_rows, learning_rate=LEARNING_RATE, compile=variant.compiled)
    operation = Execution(
        checkpoint_steps=10**6, micro_batch_rows=micro_rows, gradient_checkpointing=variant.checkpointing
    )
    # The model is made already, so this is only said.
    base = Scratch(hidden_size=2, intermediate_size=1, layers=1, heads=1)
    rank = next((config.r for config in getattr(model, "peft_config", {}).values()), None)
    spec = SftSpec(base=base, training=settings, lora=rank and Lora(rank=rank), quantization=None)
    fitness = check_machine(spec, operation, compute, inner_model(model).config, rows)
    with tempfile.TemporaryDirectory() as name:
        work = WorkFolder(Path(name))
        work.start()
        run = TrainingRun(spec=spec, operation=operation, work=work, compute=compute)
        trainer = Measured(model=model, rows=rows, run=run)
        trainer.add_callback(Ends())
        fit(trainer)
    expected = fitness.estimate and fitness.estimate.expected
    return {"expected_memory_gb": expected / 1e9} if expected else {}


def _loop(
    model: torch.nn.Module, rows: MadeRows, variant: Variant, compute: Compute, sizes: tuple[int, int], marks: Marks
) -> dict[str, Any]:
    """Run the same work without the Trainer."""
    in_loop(
        model, rows, compute, sizes, marks,
        count=lambda marks, batch: _count(marks, batch, len(batch["targets"])),
        loss=lambda model, batch: batch_loss(model, batch, chunked=variant.chunked) / len(batch["targets"]),
        compiled=variant.compiled, checkpointing=variant.checkpointing,
    )  # fmt: skip
    return {}


def in_loop(
    model: torch.nn.Module,
    rows: MadeRows,
    compute: Compute,
    sizes: tuple[int, int],
    marks: Marks,
    *,
    count: Callable[[Marks, dict[str, Any]], None],
    loss: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor],
    compiled: bool,
    checkpointing: bool = False,
) -> None:
    """Run the training steps in a plain loop.

    Args:
        sizes: rows of a micro-batch, and of a step.
        count: notes what is in a batch; loss: of it.
    """
    micro_rows, batch_rows = sizes
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=compute.device.type == "cuda")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if compiled:
        compile_layers(model, compute, checkpointing=checkpointing)
    order = np.random.default_rng(0).permutation(len(rows))
    for at in range(0, len(order), micro_rows):
        batch = collate([rows[row] for row in order[at : at + micro_rows]], compute.kernel, rows.longest[0])
        count(marks, batch)
        batch = batch.to(compute.device)
        with compute.autocast():
            mean = loss(model, batch)
        mean.backward()
        if (at + micro_rows) % batch_rows:
            continue
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if marks.step_ended():
            return
    raise AssertionError("too few rows were made")
