"""DPO with LoRA on pairs whose prompts are computed once: pairs/s and memory of one shape.

The reference's log-probabilities are known beforehand, on all sides. Steps are those of our trainer, or of a plain loop over
the same engine where it lacks something, as in `measure`.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.measure import LEARNING_RATE, NEEDED_BY_TRAINER, Marks, as_many_as_fit, in_loop
from benchmarks.gpu.pairs import MadePairRows, make_pairs
from benchmarks.gpu.shapes import Shape, add_adapters, make_model

from snaketune.models.devices import Compute
from snaketune.models.logprobs import pair_logprobs, token_losses
from snaketune.models.selftest import self_test

BETA = 0.1


def preferences(shape: Shape, proportion: str, compute: Compute, warm_up: int, steps: int) -> dict[str, Any]:
    """Measure a shape with as many rows as fit, halving its initial number."""
    return with_pairs_per_s(
        as_many_as_fit(
            shape.micro_rows, lambda micro_rows: _steps(shape, proportion, compute, micro_rows, warm_up, steps)
        )
    )


def with_pairs_per_s(found: dict[str, Any]) -> dict[str, Any]:
    """Add pairs/s to an entry that holds a measurement."""
    return found | ({"pairs_per_s": found["pairs"] / found["seconds"]} if "pairs" in found else {})


def _steps(
    shape: Shape, proportion: str, compute: Compute, micro_rows: int, warm_up: int, steps: int
) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(compute.device)
    model = make_model(shape, compute)
    tested = self_test(model, [], compute, training=True)
    model = add_adapters(model, shape.rank)
    torch._dynamo.reset()
    made = make_pairs(shape.batch_rows * (warm_up + steps), shape.length, shape.model["vocab_size"], proportion)
    marks = Marks(warm_up, steps, compute.device)
    lacking = [name for name in NEEDED_BY_TRAINER if find_spec(name) is None]
    if lacking:
        in_loop(
            model, made.rows, compute, (micro_rows, shape.batch_rows), marks, count=_count, loss=_loss, compiled=on_cuda
        )
    else:
        _trainer(model, made.rows, compute, (micro_rows, shape.batch_rows), marks, compiled=on_cuda)
    return marks.found() | {
        "driven_by": f"a plain loop (no {', '.join(lacking)} for the trainer)" if lacking else "DpoTrainer",
        "kernel": compute.kernel,
        "dtype": str(compute.dtype).removeprefix("torch."),
        "compiled": on_cuda,
        "self_test_share": tested.share,
        "peak_memory_gb": torch.cuda.max_memory_allocated(compute.device) / 1e9 if on_cuda else None,
    }


def _count(marks: Marks, batch: dict[str, Any]) -> None:
    placed = batch["segments"].layout
    marks.count(tokens=placed.document_tokens, pairs=len(placed.completions) // 2, supervised=len(batch["targets"]))


def _loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the sigmoid loss of a batch's pairs with a zero reference."""
    sums_P2, _ = pair_logprobs(token_losses(model, batch), batch)
    return -F.logsigmoid(BETA * (sums_P2[:, 0] - sums_P2[:, 1])).mean()


def _trainer(
    model: torch.nn.Module,
    rows: MadePairRows,
    compute: Compute,
    sizes: tuple[int, int],
    marks: Marks,
    *,
    compiled: bool,
) -> None:
    """Run training steps as `training.loop.pipeline` does."""
    from transformers import TrainerCallback

    from snaketune.config.operation import Execution
    from snaketune.config.training_runs import Learning
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.specs import DpoSpec
    from snaketune.training.loop.pipeline import fit
    from snaketune.training.loop.trainer import TrainingRun
    from snaketune.training.preference.dpo_trainer import DpoTrainer

    class Measured(DpoTrainer):
        def check_start(self):
            """Skip the check: the reference is made up, so it differs from the policy."""

        def training_step(self, model, inputs, *others):
            _count(marks, inputs)
            return super().training_step(model, inputs, *others)

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= marks.step_ended()

    micro_rows, batch_rows = sizes
    settings = Learning(batch_rows=batch_rows, learning_rate=LEARNING_RATE, compile=compiled)
    operation = Execution(checkpoint_steps=10**6, micro_batch_rows=micro_rows, gradient_checkpointing=False)
    spec = DpoSpec(beta=BETA, training=settings, lora=None, quantization=None, trust_remote_code=False)
    with tempfile.TemporaryDirectory() as name:
        work = WorkFolder(Path(name))
        work.start()
        trainer = Measured(
            model=model, rows=rows, run=TrainingRun(spec=spec, operation=operation, work=work, compute=compute)
        )
        trainer.add_callback(Ends())
        fit(trainer)
