"""Forward passes: of packed rows, allowed only after the model's self-test; logits at selected positions; without dropout."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from snaketune.engine.model.chunked_head import OfLogits, Supervised
from snaketune.engine.model.kernels import SEPARATE, Segments
from snaketune.engine.model.mixers import set_segments
from snaketune.engine.model.padded_documents import batch_dependent_rope

# Names of probabilities in modules and configs: dropout, attn_pdrop, layerdrop, and the noise on inputs of experts and routers.
# phimoe's `router_jitter_noise` is excluded: it is a threshold, used in evaluation too.
RANDOM = re.compile(r"(?!router_jitter_noise).*(dropout|pdrop|layerdrop|jitter_noise|moe_jitter_eps).*")


def packed_losses(model: torch.nn.Module, batch: dict[str, Any], *, summed: bool) -> torch.Tensor:
    """Return negative log-probabilities of the supervised tokens of a packed batch, float32[N], or their sum. RuntimeError:
    the model hasn't passed `engine.model.selftest.self_test` with the batch's kernel."""
    return _packed(model, batch, summed=summed)


def packed_values(
    model: torch.nn.Module, batch: dict[str, Any], of_logits: OfLogits
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return negative log-probabilities as `packed_losses`, float32[N], and what `of_logits` computes of the logits of each
    position that predicts a supervised token (`batch["sources"]`), in chunks."""
    return _packed(model, batch, summed=False, of_logits=of_logits)


def _packed(model: torch.nn.Module, batch: dict[str, Any], *, summed: bool, of_logits: OfLogits | None = None) -> Any:
    segments: Segments = batch["segments"]
    prefixed, inner = segments.layout.prefixed, inner_model(model)
    if (segments.kernel, prefixed) not in getattr(inner, "allowed_packed", ()):
        what = "shared prompts" if prefixed else "documents"
        raise RuntimeError(
            f"packed forward of {what} by kernel {segments.kernel} before its self-test; call self_test first"
        )
    set_segments(inner, segments)
    sources, targets = batch["sources"], batch["targets"]
    if hasattr(inner, "original_forward"):
        rows_N = batch["source_rows"] if prefixed else None
        supervised = Supervised(sources_U=sources, rows_N=rows_N, targets_N=targets, summed=summed, of_logits=of_logits)
        return model(**packed_inputs(batch), supervised=supervised)
    logits_UV = packed_logits(model, batch, sources)
    logits_NV = logits_UV.index_select(0, batch["source_rows"])
    losses = F.cross_entropy(logits_NV.float(), targets, reduction="sum" if summed else "none")
    return (losses, of_logits(logits_UV.float(), 0)) if of_logits else losses


def allow_packed(model: PreTrainedModel, kernel: str, prefixes: bool) -> None:
    """Record that `model` passed its self-test with `kernel`, with or without shared prefixes; called by the self-test only."""
    model.allowed_packed = getattr(model, "allowed_packed", set()) | {(kernel, False), (kernel, prefixes)}


def packed_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a causal language model's forward for a packed batch."""
    segments: Segments = batch["segments"]
    positions_1T = segments.positions_T[None]
    return {"input_ids": batch["input_ids"], "position_ids": positions_1T, "segments": segments, "use_cache": False}


def packed_logits(
    model: torch.nn.Module,
    batch: dict[str, Any],
    positions_N: torch.Tensor,
    before_pass: Callable[[torch.Tensor], None] = lambda tokens: None,
) -> torch.Tensor:
    """Return logits [N, V] at some positions of a packed batch. `before_pass` is called before each pass of the model with the
    tokens of the batch that are its inputs, int64[B, L]; padding of documents is token 0."""
    segments: Segments = batch["segments"]
    set_segments(inner_model(model), segments)
    all_T = torch.arange(segments.layout.tokens, device=batch["input_ids"].device)
    if segments.kernel != SEPARATE:
        before_pass(all_T[None])
        return logits_at(model, packed_inputs(batch), positions_N)[0]
    padded = segments.padded(batch_dependent_rope(inner_model(model).config))
    places_N = padded.places_T.index_select(0, positions_N)
    indices, logits, begin = [], [], 0
    for tokens_BL in padded.split(all_T):
        own_N = ((places_N >= begin) & (places_N < begin + tokens_BL.numel())).nonzero()[:, 0]
        if len(own_N):
            place_N = places_N[own_N] - begin
            rows, row_N = (place_N // tokens_BL.shape[1]).unique(return_inverse=True)
            columns, column_N = (place_N % tokens_BL.shape[1]).unique(return_inverse=True)
            before_pass(tokens_BL[rows])
            inputs = {"input_ids": batch["input_ids"][0][tokens_BL[rows]], "use_cache": False}
            indices.append(own_N)
            logits.append(logits_at(model, inputs, columns)[row_N, column_N])
        begin += tokens_BL.numel()
    return torch.cat(logits)[torch.cat(indices).argsort()]


def logits_at(model: torch.nn.Module, inputs: dict[str, Any], positions_N: torch.Tensor) -> torch.Tensor:
    """Return logits [B, N, V] at some positions of every sequence; only these are computed if the model supports that."""
    if _has_logits_to_keep(type(inner_model(model))):
        return model(**inputs, logits_to_keep=positions_N).logits
    return model(**inputs).logits[:, positions_N]


@cache
def _has_logits_to_keep(model_class: type) -> bool:
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return transformers' model inside wrappers of adapters and distributed training."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Make `model` compute in training mode as in evaluation mode while the context lasts; its settings are restored.

    DPO compares log-probabilities of the policy with the reference's; dropout would make them differ before anything is
    learned (TRL's DPOTrainer has `disable_dropout`). Modules that are added inside (adapters) retain their dropout.
    """
    owners = [
        owner for module in model.modules() for owner in (module, getattr(module, "config", None)) if owner is not None
    ]
    probabilities = [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if _is_probability(owner, name, value)
    ]
    for owner, name, _ in probabilities:
        setattr(owner, name, 0.0)
    try:
        yield
    finally:
        for owner, name, value in probabilities:
            setattr(owner, name, value)


def _is_probability(owner: Any, name: str, value: Any) -> bool:
    matches = RANDOM.fullmatch(name) or (isinstance(owner, _DropoutNd) and name == "p")
    return bool(matches) and isinstance(value, float) and value > 0
