"""Forward passes over packed rows, allowed only after the model's self-test, and logits at selected positions."""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from snaketune.models.chunked_head import Supervised
from snaketune.models.kernels import Segments


def packed_losses(model: torch.nn.Module, batch: dict[str, Any], *, summed: bool) -> torch.Tensor:
    """Return negative log-probabilities of the supervised tokens of a packed batch, float32[N], or their sum.

    Raises:
        RuntimeError: the model hasn't passed `models.selftest.self_test` with the batch's kernel.
    """
    segments: Segments = batch["segments"]
    inner = inner_model(model)
    if (segments.kernel, segments.layout.prefixed) not in getattr(inner, "allowed_packed", ()):
        what = "shared prompts" if segments.layout.prefixed else "documents"
        raise RuntimeError(
            f"packed forward of {what} by kernel {segments.kernel} before its self-test; call self_test first"
        )
    if hasattr(inner, "original_forward"):
        rows_N = batch["source_rows"] if segments.layout.prefixed else None
        supervised = Supervised(sources_U=batch["sources"], rows_N=rows_N, targets_N=batch["targets"], summed=summed)
        return model(**packed_inputs(batch), supervised=supervised)
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0].index_select(0, batch["source_rows"])
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="sum" if summed else "none")


def allow_packed(model: PreTrainedModel, kernel: str, prefixes: bool) -> None:
    """Record that `model` passed its self-test with `kernel`, with or without shared prefixes; called by the self-test only."""
    allowed = {(kernel, False), (kernel, prefixes)}
    model.allowed_packed = getattr(model, "allowed_packed", set()) | allowed


def packed_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a causal language model's forward for a packed batch."""
    segments: Segments = batch["segments"]
    return {
        "input_ids": batch["input_ids"],
        "position_ids": segments.positions_T[None],
        "segments": segments,
        "use_cache": False,
    }


def logits_at(model: torch.nn.Module, inputs: dict[str, Any], positions_N: torch.Tensor) -> torch.Tensor:
    """Return logits [B, N, V] at some positions of every sequence; only these are computed if the model supports that."""
    if _has_logits_to_keep(type(inner_model(model))):
        return model(**inputs, logits_to_keep=positions_N).logits
    return model(**inputs).logits[:, positions_N]


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return transformers' model inside wrappers of adapters and distributed training."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


@cache
def _has_logits_to_keep(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
