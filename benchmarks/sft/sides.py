"""The sides of the comparison, one function each, run in separate processes.

Real tokens are those of documents; padding isn't counted. A step lasts from the end of the step before it, so that what a
trainer does besides computing (reading rows, collating, logging) is in it on every side.
"""

import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from benchmarks.clock import Clock, packed_counts
from benchmarks.data_path.rows import as_messages
from benchmarks.jobs import ROW_LENGTH, Project
from benchmarks.results import in_bfloat16
from benchmarks.sft.material import CONVERSATIONS, LEARNING_RATE, ROWS, base_of, raw_of
from benchmarks.trl_training import counts, train_by_trl


def ours(project: Project, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by the `sft` stage with a clock on its trainer."""
    from snaketune.training import prepared_sft

    clock, job = Clock(warm_up, steps), project.job("sft", "start")
    timed = clock.timing(prepared_sft.SftTrainer, packed_counts)
    with tempfile.TemporaryDirectory() as work, patch.object(prepared_sft, "SftTrainer", timed):
        outcome = project.build(job, work)
    said = {name: value for name, value in outcome.run.items() if name != "history"}
    return clock.found() | {"optimizer": job.spec.training.optimizer, "about": outcome.about, "run": said}


def trl_packed(project: Project, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with its documented packing, best-fit-decreasing, which also avoids padding."""
    return _trl(project, warm_up, steps, packing=True, packing_strategy="bfd", per_device_train_batch_size=ROWS)


def trl_unpacked(project: Project, warm_up: int, steps: int) -> dict[str, Any]:
    """Train by TRL with one conversation per row, each batch padded to its longest."""
    return _trl(project, warm_up, steps, packing=False, per_device_train_batch_size=CONVERSATIONS)


def _trl(project: Project, warm_up: int, steps: int, **settings: Any) -> dict[str, Any]:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    clock = Clock(warm_up, steps)
    rows = load_dataset("json", data_files=str(raw_of(project)), split="train")
    trainer = train_by_trl(
        clock.timing(SFTTrainer, counts), SFTConfig, model=AutoModelForCausalLM.from_pretrained(base_of(project)),
        rows=rows.map(as_messages, remove_columns=rows.column_names),
        tokenizer=AutoTokenizer.from_pretrained(project.tokenizer), max_length=ROW_LENGTH,
        assistant_only_loss=True, bf16=in_bfloat16(project.precision),
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant_with_warmup", warmup_steps=0,
        **settings,
    )  # fmt: skip
    return clock.found() | {"optimizer": str(trainer.args.optim), "rows": len(trainer.train_dataset)}


SIDES: dict[str, Callable[[Project, int, int], dict[str, Any]]] = {
    "snaketune": ours, "trl packed": trl_packed, "trl unpacked": trl_unpacked,
}  # fmt: skip
