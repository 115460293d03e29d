"""Checks of saved weights: against the base with its adapter, the training's last measurement, and other data types."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snaketune.config.held_out import Evaluate
from snaketune.diagnostics.checks import sequences
from snaketune.diagnostics.checks.check import Check, judged, not_checked
from snaketune.engine.measurements import HELD_OUT
from snaketune.engine.model.adapters import load_adapter, merge
from snaketune.engine.model.logit_differences import (
    TOLERANCE,
    difference_quantile,
    largest_differences,
    scale_of,
)
from snaketune.training.pipeline import measure_held_out, ready_trainer
from snaketune.training.prepared import PreparedTraining

MERGED, SAVED, BFLOAT16, GGUF = (
    "merged = base + adapter",
    "saved = in memory",
    "bfloat16 = float32",
    "GGUF = Hugging Face",
)
# Of a merged weight's largest value: sums of float32 products on another machine differ by less.
ROUNDING = 1e-6
# The share of a tensor's weights that such a difference may round to the next number of 16 bits.
ROUNDED_OTHERWISE = 0.01
# By how much a held-out loss may change, relative to it: by the order of sums, or by rounded weights.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@torch.no_grad()
def logits_of_all(model: torch.nn.Module, documents: Sequence[sequences.Sequence]) -> torch.Tensor:
    """The logits of all tokens of some sequences, each of them alone, float32[N, V]."""
    model.eval()
    return torch.cat([sequences.logits_of(model, document).float() for document in documents])


def merged_equals_base_and_adapter(
    base: PreTrainedModel,
    adapter: Path,
    saved: PreTrainedModel,
    dtype: torch.dtype,
    documents: list[sequences.Sequence],
) -> Check:
    """Compare saved weights with those of the base plus adapter, rounded; and logits of the merge with those of both apart.

    Args:
        base, saved: in float32; the base with the rounding of the training's.
        dtype: in which the weights were saved.
    """
    model = load_adapter(base, adapter)
    apart_NV = logits_of_all(model, documents)
    merged = merge(model, torch.float32)
    share = (largest_differences(logits_of_all(merged, documents), apart_NV).max() / scale_of(apart_NV)).item()
    # The saved model may have parts besides, which weren't trained.
    found = dict(saved.named_parameters())
    worst, name = max(
        (differing_share(found[name], weight, dtype), name)
        for name, weight in merged.named_parameters()
        if name in found
    )
    compares = f"share of the weights of a tensor that aren't base + adapter, rounded to {str(dtype)[6:]}"
    if not share <= TOLERANCE[torch.float32]:
        reason = "the logits of base and adapter apart differ from those of the two merged"
        return judged(MERGED, f"logits, relative to their scale, of {len(documents)} texts", share, 1e-3, reason=reason)
    return judged(MERGED, compares, worst, ROUNDED_OTHERWISE, reason=f"most of {name}")


@torch.no_grad()
def differing_share(saved: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest share of the weights of a tensor, or of one of its experts, that aren't the expected ones, rounded.

    >>> expected = torch.ones(4, 2, 2)
    >>> saved = expected.clone()
    >>> saved[3] += 0.01
    >>> differing_share(saved, expected, torch.float32)
    1.0
    """
    expected = expected.to(saved.device)
    differs = (saved - expected.to(dtype).float()).abs() > ROUNDING * expected.abs().max()
    experts = differs.flatten(1) if differs.dim() > 2 else differs.reshape(1, -1)
    return experts.float().mean(1).max().item()


def saved_equals_trained(training: PreparedTraining, record: dict[str, Any], dtype: torch.dtype) -> Check:
    """Measure held-out rows again with the saved weights, as the training did at its end.

    Args:
        training: that starts from the saved weights, without adapters.
        record: run.json of the training.
        dtype: in which the weights were saved.
    """
    compares = "held-out loss by the saved weights, relative to that at the training's end"
    measured = record.get("held_out", {})
    points, kept = measured.get("points", []), record.get("kept", {}).get("step")
    steps = max((entry["step"] for entry in record.get("history", [])), default=0)
    point = next((point for point in points if point["step"] == (steps if kept is None else kept)), None)
    if point is None:
        return not_checked(SAVED, compares, "the training measured no held-out rows at its end")
    evaluate = Evaluate(every=1, rows=measured["rows"], samples=0)
    operation = training.run.operation.model_copy(update={"evaluate": evaluate})
    training = replace(training, run=replace(training.run, operation=operation))
    with ready_trainer(training) as (trainer, _):
        measure_held_out(trainer, training)
        if trainer.held_out is None:
            return not_checked(SAVED, compares, "held-out rows can't be measured here")
        # So many rows are the same ones, however many steps there are.
        trainer.held_out.plan(steps=1)
        with trainer.compute.autocast():
            trainer.held_out.measure(interruptible=False)
        loss = next(entry for entry in trainer.state.log_history if f"{HELD_OUT}loss" in entry)[f"{HELD_OUT}loss"]
        rounded = max(dtype, trainer.compute.dtype, key=LOSS_TOLERANCE.__getitem__)
    figure = abs(loss - point["loss"]) / max(abs(point["loss"]), 1e-3)
    reason = f"{loss:.6g}, and {point['loss']:.6g} at step {point['step']}"
    return judged(SAVED, f"{compares}, {evaluate.rows} rows", figure, LOSS_TOLERANCE[rounded], reason=reason)


def bfloat16_equals_float32(
    loaded: PreTrainedModel, in_bfloat16: PreTrainedModel, documents: list[sequences.Sequence]
) -> Check:
    """Compare the logits of the model loaded in bfloat16 with those of the model loaded in float32."""
    return _same_logits(BFLOAT16, loaded, in_bfloat16, documents, TOLERANCE[torch.bfloat16])


def gguf_equals_hugging_face(
    loaded: PreTrainedModel, from_gguf: PreTrainedModel, documents: list[sequences.Sequence], tolerance: float
) -> Check:
    """Compare the logits of the GGUF file's weights, read by transformers, with those of the model's own."""
    return _same_logits(GGUF, loaded, from_gguf, documents, tolerance)


def _same_logits(
    name: str,
    loaded: PreTrainedModel,
    other: PreTrainedModel,
    documents: list[sequences.Sequence],
    tolerance: float,
) -> Check:
    expected_NV, found_NV = (logits_of_all(model, documents) for model in (loaded, other))
    shares_N = largest_differences(found_NV, expected_NV) / scale_of(expected_NV)
    compares = f"logits of nine tokens in ten, relative to their scale, of {len(documents)} texts"
    return judged(name, compares, difference_quantile(shares_N, torch.bfloat16), tolerance)
