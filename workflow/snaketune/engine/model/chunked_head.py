"""The output head and its loss, computed in chunks, so that the logits [N, V] of all tokens never exist in memory together.

    plain linear head,   gradients are computed together with the losses: 6NVH FLOPs as without chunks, and memory for the
    summed loss          logits of one chunk
    plain linear head,   exponentials of the logits are saved for the backward pass; beyond SAVED_LOGITS they are recomputed:
    loss per token       8NVH FLOPs
    any other head       the model's own code (bias, scaling, soft-capping, adapters) runs on the hidden states of a chunk; with
                         more than SAVED_LOGITS logits it runs again in the backward pass: 8NVH FLOPs

The head runs inside the model's forward, so inside any wrapper: adapters, autocast, DDP, FSDP. Shapes: N supervised tokens, U
positions that predict them (with shared prefixes one may predict several), C of these in a chunk, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from snaketune.engine.model import fused_cross_entropy
from snaketune.engine.model.fused_cross_entropy import SummedLosses, TokenLosses, target_logits
from snaketune.engine.model.kernels import SEPARATE, Segments
from snaketune.engine.model.padded_documents import batch_dependent_rope

OfLogits = Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Request for losses instead of logits, an argument of the model's forward: the positions that predict supervised
    tokens, each once; the index of each token's source (None where each source predicts one token, in order); token ids;
    and whether to return the sum, or one loss per token. With `of_logits`, further values are returned: what it computes of
    the logits of a chunk, [C, V], and the index of the chunk's first source: tensors whose first dimension is C."""

    sources_U: torch.Tensor
    rows_N: torch.Tensor | None
    targets_N: torch.Tensor
    summed: bool
    of_logits: OfLogits | None = None


class _DecoderOutputs(Exception):
    """The decoder's outputs, raised to stop the forward before the head."""


class _Computed(torch.nn.Module):
    """A decoder whose forward returns outputs that are there already."""

    def __init__(self, decoder: torch.nn.Module, outputs: Any):
        super().__init__()
        self.decoder, self.outputs = decoder, outputs

    def __getattr__(self, name: str) -> Any:
        """Return the decoder's attributes too, which the forward around it may read (embeddings)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.decoder, name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.outputs


class _DecoderNotCalled(Exception):
    """The model's forward doesn't call the module that `get_decoder` returns."""


def chunk_head(model: PreTrainedModel, inputs: dict[str, Any], positions_N: torch.Tensor) -> bool:
    """Give `model`'s forward the argument `supervised`, and return True; False, without a change, if its head can't be run
    apart from its decoder. This is checked on a forward with `inputs`, by the logits of `positions_N`."""
    if hasattr(model, "original_forward"):
        return True
    with torch.no_grad():
        try:
            outputs = _run_decoder(model, model.forward, inputs)
            hidden_CH = outputs[0][0, positions_N]
            actual = _run_head(model, model.forward, outputs, hidden_CH, inputs)
            expected = model(**inputs).logits[0, positions_N]
        except (_DecoderNotCalled, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        if not _is_close(actual, expected):
            return False
        model.head_is_linear = _is_plain_linear(model, outputs, hidden_CH, inputs)
    model.original_forward = model.forward
    # With the signature of the model's own forward, from which generation reads the arguments to pass (positions). A bound
    # method, so that a deep copy of the model binds it to the copy.
    forward = wraps(type(model).forward)(lambda *arguments, **inputs: _forward(*arguments, **inputs))
    model.forward = MethodType(forward, model)
    return True


def _forward(
    model: PreTrainedModel, *arguments: Any, supervised: Supervised | None = None, **inputs: Any
) -> torch.Tensor | Any:
    """Return negative log-probabilities of the supervised tokens, float32[N] or their sum; with `of_logits`, the former and
    its values for all sources; without `supervised`, the original forward's outputs."""
    if supervised is None:
        return model.original_forward(*arguments, **inputs)
    outputs, inputs, hidden_UH = _decode(model, inputs, supervised.sources_U)
    rows_N, targets_N = supervised.rows_N, supervised.targets_N
    head = model.get_output_embeddings()
    if (copies := getattr(head, "modules_to_save", None)) is not None:
        head = copies["default"]
    # The type is checked again, since adapters may have wrapped the head since `chunk_head`.
    plain_linear = model.head_is_linear and type(head) is torch.nn.Linear
    passes = fused_cross_entropy.fused_passes() if getattr(model, "fused_head", False) else fused_cross_entropy.EAGER
    vocabulary = model.config.get_text_config().vocab_size

    def logits_of(hidden_CH: torch.Tensor) -> torch.Tensor:
        return _run_head(model, model.original_forward, outputs, hidden_CH, inputs).float()

    if supervised.of_logits:
        return _token_losses(logits_of, hidden_UH, supervised, vocabulary)
    if plain_linear and supervised.summed and rows_N is None:
        return SummedLosses.apply(hidden_UH, head.weight, targets_N, passes)
    # Not under ZeRO 3, which gathers weights for module calls only and releases them before the backward pass.
    if plain_linear and not hasattr(head.weight, "ds_id"):
        rows_N = torch.arange(len(hidden_UH), device=hidden_UH.device) if rows_N is None else rows_N
        losses_N = TokenLosses.apply(hidden_UH, head.weight, rows_N, targets_N, torch.is_grad_enabled(), passes)
    else:
        losses_N, _ = _token_losses(logits_of, hidden_UH, supervised, vocabulary)
    return losses_N.sum() if supervised.summed else losses_N


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    decoder = model.get_decoder()
    # Llama 4's `get_decoder` returns the model itself.
    decoder = getattr(model, "model", model) if decoder is model else decoder
    if decoder is model:
        raise _DecoderNotCalled
    return decoder


def _decode(
    model: PreTrainedModel, inputs: dict[str, Any], sources_U: torch.Tensor
) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """Return outputs and inputs of the decoder, of the last group if documents run separately, and the sources' hidden states
    [U, H]."""
    segments: Segments = inputs["segments"]
    if segments.kernel != SEPARATE:
        outputs = _run_decoder(model, model.original_forward, inputs)
        return outputs, inputs, outputs[0][0].index_select(0, sources_U)
    padded, hidden = segments.padded(batch_dependent_rope(model.config)), []
    for ids_BL in padded.split(inputs["input_ids"][0]):
        inputs = {"input_ids": ids_BL, "use_cache": False}
        outputs = _run_decoder(model, model.original_forward, inputs)
        hidden.append(outputs[0])
    return outputs, inputs, padded.merge(hidden, sources_U)


def _run_decoder(model: PreTrainedModel, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Return the decoder's outputs in a forward that stops before the head."""

    def stop(module: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        raise _DecoderOutputs(outputs)

    hook = _decoder(model).register_forward_hook(stop)
    try:
        forward(**inputs)
    except _DecoderOutputs as decoder_outputs:
        return decoder_outputs.args[0]
    finally:
        hook.remove()
    raise _DecoderNotCalled


def _run_head(
    model: PreTrainedModel, forward: Callable[..., Any], outputs: Any, hidden_CH: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """Return the logits [C, V] of the model's forward with its decoder's hidden states replaced by `hidden_CH`."""
    if isinstance(outputs, tuple):
        replaced = (hidden_CH[None], *outputs[1:])
    else:
        replaced = copy.copy(outputs)
        replaced.last_hidden_state = hidden_CH[None]
    decoder = _decoder(model)
    name = next(name for name, module in model.named_modules() if module is decoder)
    model.set_submodule(name, _Computed(decoder, replaced))
    try:
        return forward(**inputs).logits[0]
    finally:
        model.set_submodule(name, decoder)


def _is_plain_linear(model: PreTrainedModel, outputs: Any, hidden_CH: torch.Tensor, inputs: dict[str, Any]) -> bool:
    """Whether logits are hidden states times the head's weight, without bias, scaling or capping."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return False
    # Scaled up, so that a soft cap would change the logits.
    large_CH = hidden_CH * (50 / F.linear(hidden_CH, head.weight).std().clamp(min=1e-6))
    logits_CV = _run_head(model, model.forward, outputs, large_CH, inputs)
    return _is_close(logits_CV, F.linear(large_CH, head.weight))


def _is_close(one_CV: torch.Tensor, other_CV: torch.Tensor) -> bool:
    """Whether logits are equal up to the rounding of matmuls of different shapes."""
    rounding = 1e-4 if other_CV.dtype == torch.float32 else 5e-3
    return one_CV.shape == other_CV.shape and bool((one_CV - other_CV).abs().max() <= rounding * other_CV.abs().max())


def _token_losses(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden_UH: torch.Tensor, supervised: Supervised, vocabulary: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the losses [N], and the values of `of_logits`, [U, ...]."""
    rows_N, targets_N, of_logits = supervised.rows_N, supervised.targets_N, supervised.of_logits

    def of_chunk(hidden_CH: torch.Tensor, begin: int) -> tuple[torch.Tensor, ...]:
        """Return the losses [C] where each position predicts one token, in order; else the log-normalizers of the positions,
        [C], and each token's target logit, [N], 0 in other chunks; then the values of `of_logits`."""
        logits_CV = logits_of(hidden_CH)
        if rows_N is None:
            losses_C = F.cross_entropy(logits_CV, targets_N[begin : begin + len(hidden_CH)], reduction="none")
            first: tuple[torch.Tensor, ...] = (losses_C,)
        else:
            first = logits_CV.logsumexp(1), target_logits(logits_CV, begin, rows_N, targets_N)
        return *first, *(of_logits(logits_CV, begin) if of_logits else ())

    rows = max(fused_cross_entropy.SAVED_LOGITS // vocabulary, fused_cross_entropy.MIN_CHUNK_ROWS)
    if not torch.is_grad_enabled():
        rows = fused_cross_entropy.even_rows(len(hidden_UH), rows)
    if len(hidden_UH) <= rows:
        results = [of_chunk(hidden_UH, 0)]
    else:
        chunks = enumerate(hidden_UH.split(rows))
        results = [checkpoint(of_chunk, hidden_CH, n * rows, use_reentrant=False) for n, hidden_CH in chunks]
    by_value = list(zip(*results))
    if rows_N is None:
        return torch.cat(by_value[0]), tuple(map(torch.cat, by_value[1:]))
    losses_N = torch.cat(by_value[0]).index_select(0, rows_N) - torch.stack(by_value[1]).sum(0)
    return losses_N, tuple(map(torch.cat, by_value[2:]))
