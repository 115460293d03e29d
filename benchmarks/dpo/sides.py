"""The sides of the comparison, one function each, run in separate processes.

Ours are the stages' own `build`, whose trainer has a clock. TRL's DPOTrainer computes reference log-probabilities beforehand
(`precompute_ref_log_probs`), as its documentation recommends to save memory and, over several epochs, time.
"""

import tempfile
import time
from typing import Any
from unittest.mock import patch

from benchmarks.clock import Clock
from benchmarks.dpo.material import BETA, PAIRS_PER_STEP, pairs_of
from benchmarks.jobs import Project
from benchmarks.results import in_bfloat16
from benchmarks.sft.material import LEARNING_RATE
from benchmarks.trl_training import train_by_trl

# More than any training here has.
ALL = 10**6


def ours(project: Project, *, run: str, steps: int = ALL, epochs: float = 1, log_steps: int = 10) -> dict[str, Any]:
    """Train by the `dpo` stage.

    Returns:
        What the clock found; `order`, by step the numbers of its pairs; and the curve.
    """
    from snaketune.training import prepared_dpo

    pairs = pairs_of(project, run)
    known = {pair.sequences: number for number, pair in enumerate(pairs)}
    clock, order = Clock(0, steps), []

    def counts(inputs: dict[str, Any]) -> dict[str, int]:
        if len(order) == len(clock.ends):
            order.append([])
        found = [known[sequences] for sequences in sequences_of(inputs, pairs[0].chosen_ids[-1])]
        order[-1] += found
        return {"pairs": len(found), "tokens": inputs["input_ids"].numel()}

    job = project.job("dpo", run)
    training = job.spec.training.model_copy(update={"epochs": epochs})
    spec = job.spec.model_copy(update={"training": training})
    operation = job.operation.model_copy(update={"log_steps": log_steps})
    timed = clock.timing(prepared_dpo.DpoTrainer, counts)
    with tempfile.TemporaryDirectory() as work, patch.object(prepared_dpo, "DpoTrainer", timed):
        outcome = project.build(job, work, spec=spec, operation=operation)
    said = {name: value for name, value in outcome.run.items() if name != "history"}
    losses = [entry["loss"] for entry in outcome.run["history"]]
    return clock.found() | {"order": order, "losses": losses, "run": said, "about": outcome.about}


def ours_reference(project: Project, *, run: str) -> dict[str, Any]:
    """Time the `ref_logps` stage from the loaded and tested model to the written table."""
    from snaketune.training.reference import compute

    begins, find_units = [], compute.find_units

    def timed(*arguments):
        # The first that follows the loading.
        begins.append(time.perf_counter())
        return find_units(*arguments)

    job = project.job("dpo", run).artifacts["ref_logps"][0]
    with tempfile.TemporaryDirectory() as work, patch.object(compute, "find_units", timed):
        outcome = project.build(job, work)
    seconds, pairs = time.perf_counter() - begins[0], sum(outcome.counts["pairs"].values())
    return {"pairs": pairs, "seconds": seconds, "pairs_per_s": pairs / seconds}


def sequences_of(batch: dict[str, Any], end_of_turn: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the chosen and rejected sequence of each pair of a collated batch, up to the end of the turn."""
    import numpy as np

    placed, ids_T = batch["segments"].layout, batch["input_ids"][0].numpy()
    sequences = []
    for segment in placed.completions:
        whole = ids_T[placed.sequence_tokens(segment, np.arange(placed.sequence_lengths[segment]))]
        # Templates put a line break after it.
        sequences.append(tuple(whole[: np.flatnonzero(whole == end_of_turn)[-1] + 1].tolist()))
    return list(zip(sequences[::2], sequences[1::2], strict=True))


def trl(
    project: Project, *, run: str, order: list[list[int]], at_once: tuple[int, int], exactly: bool = False
) -> dict[str, Any]:
    """Run TRL's DPOTrainer: the reference pass, then one epoch over the same pairs in the same order.

    Args:
        order: as `ours` found it.
        exactly: whether its steps hold the very pairs of ours, all at once; else PAIRS_PER_STEP each.
        at_once: see `trl_trainer`.
    """
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from trl import DPOTrainer

    clock, losses, reference = Clock(0, ALL), [], {}

    class Observed(DPOTrainer):
        def _precompute_ref_logps(self, dataset, *others):
            started = time.perf_counter()
            found = super()._precompute_ref_logps(dataset, *others)
            reference["seconds"] = time.perf_counter() - started
            return found

        def training_step(self, model, inputs, *others):
            loss = super().training_step(model, inputs, *others)
            losses.append(float(loss))
            return loss

        def get_train_dataloader(self):
            if not exactly:
                return super().get_train_dataloader()
            columns = ["prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps"]
            rows = self.train_dataset.select_columns(columns)
            return self.accelerator.prepare(DataLoader(rows, batch_sampler=order, collate_fn=self.data_collator))

    def counts(inputs: dict[str, Any]) -> dict[str, int]:
        return {"pairs": len(inputs["input_ids"]) // 2, "tokens": inputs["input_ids"].numel()}

    pairs = pairs_of(project, run)
    numbers = range(len(pairs)) if exactly else [number for step in order for number in step]
    rows = Dataset.from_list([pairs[number].texts for number in numbers])
    settings = {"max_steps": len(order), "gradient_accumulation_steps": 1} if exactly else {}
    trl_trainer(
        clock.timing(Observed, counts), project, rows, at_once, train_sampling_strategy="sequential", **settings
    )
    reference |= {"pairs": len(rows), "pairs_per_s": len(rows) / reference["seconds"]}
    return clock.found() | {"losses": losses, "reference": reference}


def trl_sweep(
    project: Project,
    *,
    run: str,
    variants: list[dict[str, Any]],
    at_once: tuple[int, int],
    epochs: int,
    learning_rate: float,
) -> dict[str, Any]:
    """Run one TRL trainer after another in this process, each from the file of pairs to its last metrics."""
    from datasets import load_dataset
    from trl import DPOTrainer

    found = []
    for variant in variants:
        started = time.perf_counter()
        rows = load_dataset("json", data_files=str(project.folder / f"{run}.jsonl"), split="train")
        settings = {"loss_type": [variant["loss"]], "beta": variant["beta"]}
        settings |= {"num_train_epochs": epochs, "learning_rate": learning_rate}
        trainer = trl_trainer(DPOTrainer, project, rows, at_once, **settings)
        metrics = next(line for line in reversed(trainer.state.log_history) if "rewards/margins" in line)
        found.append({"variant": variant, "seconds": time.perf_counter() - started, "last": metrics})
    return {"runs": found}


def trl_trainer(trainer_type: type, project: Project, rows: Any, at_once: tuple[int, int], **more: Any) -> Any:
    """Train by TRL with settings equal to ours where they shape the result; return the trainer.

    Args:
        at_once: pairs of a forward pass in training, and of one in the reference pass.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig

    batch_size, reference_batch_size = at_once
    settings = {
        "bf16": in_bfloat16(project.precision),
        "beta": BETA,
        "learning_rate": LEARNING_RATE,
        "gradient_accumulation_steps": PAIRS_PER_STEP // batch_size,
    } | more
    return train_by_trl(
        trainer_type, DPOConfig, model=AutoModelForCausalLM.from_pretrained(project.folder / "results/sft/start/model"),
        rows=rows,
        tokenizer=AutoTokenizer.from_pretrained(project.tokenizer), precompute_ref_log_probs=True,
        precompute_ref_batch_size=reference_batch_size, per_device_train_batch_size=batch_size, max_length=None,
        lr_scheduler_type="constant", warmup_steps=0, **settings,
    )  # fmt: skip
