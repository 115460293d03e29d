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
from benchmarks.data_path.rows import as_messages
from benchmarks.flops import packed_counts
from benchmarks.jobs import ROW_LENGTH, started
from benchmarks.results import in_bfloat16
from benchmarks.sft.material import CONVERSATIONS, LEARNING_RATE, ROWS, Material
from benchmarks.trl_training import train_by_trl

# Rows, inner and columns of matrix products: those of the model's layers, and larger ones.
SHAPES = (
    (2048, 256, 256), (2048, 256, 768), (2048, 768, 256), (2048, 256, 8192), (512, 512, 512), (1024, 1024, 1024),
    (2048, 2048, 2048),
)  # fmt: skip


def ours(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by the `sft` stage with a clock on its trainer."""
    from snaketune.artifacts.manifest import read_artifact
    from snaketune.config.operation import Execution
    from snaketune.stages.specs import SftSpec
    from snaketune.training.loop import pipeline, sft_trainer
    from snaketune.training.loop.trainer import TrainingRun

    clock = Clock(warm_up, steps)
    timed = clock.timing(sft_trainer.SftTrainer, packed_counts)
    with tempfile.TemporaryDirectory() as name, patch.object(sft_trainer, "SftTrainer", timed):
        operation = Execution(checkpoint_steps=10**6, micro_batch_rows=ROWS, gradient_checkpointing=False)
        run = TrainingRun.of(SftSpec.model_validate(material.spec()), operation, started(name))
        pack, tokenizer = read_artifact(material.pack, "shards"), read_artifact(material.tokenizer, "tokenizer")
        outcome = pipeline.train(sft_trainer.prepare_training(run, pack, tokenizer))
    said = {name: value for name, value in outcome.run.items() if name != "history"}
    return clock.found() | {"optimizer": run.spec.training.optimizer, "about": outcome.about, "run": said}


def trl_packed(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with its documented packing, best-fit-decreasing, which also avoids padding."""
    return _trl(material, warm_up, steps, packing=True, packing_strategy="bfd", per_device_train_batch_size=ROWS)


def trl_unpacked(material: Material, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with one conversation per row, each batch padded to its longest."""
    return _trl(material, warm_up, steps, packing=False, per_device_train_batch_size=CONVERSATIONS)


def _trl(material: Material, warm_up: int, steps: int, **settings: Any) -> dict[str, Any]:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    def counts(inputs: dict[str, Any]) -> dict[str, int]:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        return {"tokens": tokens, "supervised": int((inputs["labels"] != -100).sum())}

    clock = Clock(warm_up, steps)
    rows = load_dataset("json", data_files=str(material.raw), split="train")
    trainer = train_by_trl(
        clock.timing(SFTTrainer, counts), SFTConfig, model=AutoModelForCausalLM.from_pretrained(material.base),
        rows=rows.map(as_messages, remove_columns=rows.column_names),
        tokenizer=AutoTokenizer.from_pretrained(material.tokenizer.parent / "tokenizer"), max_length=ROW_LENGTH,
        assistant_only_loss=True, bf16=in_bfloat16(material.precision),
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant_with_warmup", warmup_steps=0,
        **settings,
    )  # fmt: skip
    return clock.found() | {"optimizer": str(trainer.args.optim), "rows": len(trainer.train_dataset)}


def gemm(material: Material, *_: int, times: int = 30, seconds: float = 1.0) -> dict[str, Any]:
    """Return the highest matmul rate of this core: for each shape, of so many products or those in so many seconds."""
    import torch

    rates, dtype = {}, torch.bfloat16 if in_bfloat16(material.precision) else torch.float32
    for rows, inner, columns in SHAPES:
        one, other = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        best, began = float("inf"), time.perf_counter()
        for _ in range(times):
            started = time.perf_counter()
            one @ other
            now = time.perf_counter()
            best = min(best, now - started)
            if now - began > seconds:
                break
        rates[f"{rows}x{inner}x{columns}"] = 2 * rows * inner * columns / best / 1e9
    return {"gflops_per_s": rates}


SIDES: dict[str, Callable[[Material, int, int], dict[str, Any]]] = {
    "snaketune": ours, "trl packed": trl_packed, "trl unpacked": trl_unpacked, "gemm": gemm,
}  # fmt: skip


if __name__ == "__main__":
    side, material_file, warm_up, steps, out = sys.argv[1:]
    found = SIDES[side](Material.read(Path(material_file)), int(warm_up), int(steps))
    Path(out).write_text(json.dumps(found | {"peak_rss_bytes": peak_rss_bytes()}), encoding="utf-8")
