"""The sides of the comparison, one function each, run in separate processes.

    python -m benchmarks.sft.sides 'trl packed' material.json 5 30 found.json

Real tokens are those of documents; padding isn't counted. A step lasts from the end of the step before it, so that what a
trainer does besides computing (reading rows, collating, logging) is in it on every side.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.clock import Clock, peak_rss_bytes
from benchmarks.flops import visible_pairs
from benchmarks.sft.material import CONVERSATIONS, LEARNING_RATE, ROWS, Material

# Rows, inner and columns of matrix products: those of the model's layers, and larger ones.
SHAPES = (
    (2048, 256, 256), (2048, 256, 768), (2048, 768, 256), (2048, 256, 8192), (512, 512, 512), (1024, 1024, 1024),
    (2048, 2048, 2048),
)  # fmt: skip


def ours(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by the `sft` stage with a clock on its trainer."""
    from snaketune.artifacts.manifest import read_artifact
    from snaketune.config.operation import Execution
    from snaketune.stages.cache.work_folders import WorkFolder
    from snaketune.stages.specs import SftSpec
    from snaketune.training.loop import pipeline, sft_trainer
    from snaketune.training.loop.trainer import TrainingRun

    clock = Clock(warm_up, steps)

    class Timed(sft_trainer.SftTrainer):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.add_callback(clock.callback())

        def training_step(self, model, inputs, *others):
            placed = inputs["segments"].layout
            lengths = placed.lengths[placed.documents]
            clock.count(tokens=int(lengths.sum()), supervised=len(inputs["targets"]), pairs=visible_pairs(lengths))
            return super().training_step(model, inputs, *others)

    with tempfile.TemporaryDirectory() as name, patch.object(sft_trainer, "SftTrainer", Timed):
        work = WorkFolder(Path(name))
        work.start()
        operation = Execution(checkpoint_steps=10**6, micro_batch_rows=ROWS, gradient_checkpointing=False)
        run = TrainingRun.of(SftSpec.model_validate(sft_spec(material)), operation, work)
        pack, tokenizer = read_artifact(material.pack, "shards"), read_artifact(material.tokenizer, "tokenizer")
        outcome = pipeline.train(sft_trainer.prepare_training(run, pack, tokenizer))
    said = {name: value for name, value in outcome.run.items() if name != "history"}
    return clock.found() | {"optimizer": run.spec.training.optimizer, "about": outcome.about, "run": said}


def sft_spec(material: Material) -> dict[str, Any]:
    """Return a spec of the `sft` stage; keys that aren't given have their defaults."""
    training = {
        "batch_rows": ROWS, "learning_rate": LEARNING_RATE, "precision": "float32",
        "schedule": "constant_with_warmup", "warmup_fraction": 0,
    }  # fmt: skip
    return {"base": {"path": str(material.base)}, "training": training, "lora": None, "quantization": None}


def trl_packed(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with its documented packing, best-fit-decreasing, which also avoids padding."""
    return _trl(material, warm_up, steps, packing=True, packing_strategy="bfd", per_device_train_batch_size=ROWS)


def trl_unpacked(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with one conversation per row, each batch padded to its longest."""
    return _trl(material, warm_up, steps, packing=False, per_device_train_batch_size=CONVERSATIONS)


def _trl(material: Material, warm_up: int, steps: int, **settings: Any) -> dict[str, Any]:
    from benchmarks.data_path.rows import ROW_LENGTH
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    clock = Clock(warm_up, steps)

    class Timed(SFTTrainer):
        def training_step(self, model, inputs, *others):
            mask = inputs.get("attention_mask")
            tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
            clock.count(tokens=tokens, supervised=int((inputs["labels"] != -100).sum()))
            return super().training_step(model, inputs, *others)

    def as_messages(row: dict[str, str]) -> dict[str, Any]:
        said = zip(("user", "assistant"), (row["question"], row["answer"]), strict=True)
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    rows = load_dataset("json", data_files=str(material.raw), split="train")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(material.base),
            args=SFTConfig(
                output_dir=folder, max_length=ROW_LENGTH, assistant_only_loss=True, num_train_epochs=1,
                learning_rate=LEARNING_RATE, lr_scheduler_type="constant_with_warmup", warmup_steps=0,
                # Ours keeps activations too, and computes in float32.
                gradient_checkpointing=False, bf16=False, use_cpu=True,
                report_to="none", save_strategy="no", disable_tqdm=True, **settings,
            ),
            train_dataset=rows.map(as_messages, remove_columns=rows.column_names),
            processing_class=AutoTokenizer.from_pretrained(material.tokenizer.parent / "tokenizer"),
            callbacks=[clock.callback()],
        )  # fmt: skip
        trainer.train()
    return clock.found() | {"optimizer": str(trainer.args.optim), "rows": len(trainer.train_dataset)}


def gemm(*_: Any, times: int = 30) -> dict[str, Any]:
    """Return the highest float32 matmul rate of this core."""
    import torch

    rates = {}
    for rows, inner, columns in SHAPES:
        one, other = torch.randn(rows, inner), torch.randn(inner, columns)
        best = float("inf")
        for _ in range(times):
            started = time.perf_counter()
            one @ other
            best = min(best, time.perf_counter() - started)
        rates[f"{rows}x{inner}x{columns}"] = 2 * rows * inner * columns / best / 1e9
    return {"gflops_per_s": rates}


SIDES: dict[str, Callable[[Material, int, int], dict[str, Any]]] = {
    "snaketune": ours, "trl packed": trl_packed, "trl unpacked": trl_unpacked, "gemm": gemm,
}  # fmt: skip


if __name__ == "__main__":
    side, material_file, warm_up, steps, out = sys.argv[1:]
    found = SIDES[side](Material.read(Path(material_file)), int(warm_up), int(steps))
    Path(out).write_text(json.dumps(found | {"peak_rss_bytes": peak_rss_bytes()}), encoding="utf-8")
