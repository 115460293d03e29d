"""Forward passes: packed ones, which only a model that passed its self-test may make, and logits at chosen places."""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from snaketune.models.chunked_head import Supervised
from snaketune.models.kernels import Segments


def packed_losses(model: torch.nn.Module, batch: dict[str, Any], *, summed: bool) -> torch.Tensor:
    """Negative log-probabilities of the supervised tokens of a packed batch, float32[N], or their sum.

    Raises:
        RuntimeError: `models.selftest.self_test` wasn't passed by this model with the batch's kernel.
    """
    segments: Segments = batch["segments"]
    inner = inner_model(model)
    if (segments.kernel, segments.layout.prefixed) not in getattr(inner, "allowed_packed", ()):
        what = "shared prompts" if segments.layout.prefixed else "documents"
        raise RuntimeError(f"a packed forward of {what} by kernel {segments.kernel} before its self-test")
    if hasattr(inner, "original_forward"):
        rows_N = batch["source_rows"] if segments.layout.prefixed else None
        supervised = Supervised(sources_U=batch["sources"], rows_N=rows_N, targets_N=batch["targets"], summed=summed)
        return model(**packed_inputs(batch), supervised=supervised)
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0].index_select(0, batch["source_rows"])
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="sum" if summed else "none")


def allow_packed(model: PreTrainedModel, kernel: str, prefixes: bool) -> None:
    """Note that `model` passed its self-test with `kernel`, with shared prefixes or without; only the self-test calls this."""
    passed = {(kernel, False), (kernel, prefixes)}
    model.allowed_packed = getattr(model, "allowed_packed", set()) | passed


def packed_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What a causal language model's forward is given for a packed batch."""
    segments: Segments = batch["segments"]
    return {
        "input_ids": batch["input_ids"],
        "position_ids": segments.positions_T[None],
        "segments": segments,
        "use_cache": False,
    }


def logits_at(model: torch.nn.Module, inputs: dict[str, Any], places_N: torch.Tensor) -> torch.Tensor:
    """Logits [B, N, V] at some places of every sequence; where the model can, only those are computed."""
    if _keeps_logits(type(inner_model(model))):
        return model(**inputs, logits_to_keep=places_N).logits
    return model(**inputs).logits[:, places_N]


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """transformers' model inside wrappers of adapters and of distributed training."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


@cache
def _keeps_logits(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters
