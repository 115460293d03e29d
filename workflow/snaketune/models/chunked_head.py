"""The output head and its loss, some tokens at a time, so that the logits of all N tokens over V words never exist at once.

    summed losses     their gradients are made with them, chunk by chunk, where the head is a product with its weight and no
                      more: 6NVH FLOPs as without chunks, memory for the logits of one chunk
    losses one by one where the head is such a product: exponentials of the logits are all that is kept for the backward pass,
                      which is matrix products and nothing else of that size; beyond FREE they are made again: 8NVH
    any other head    whatever it does (bias, scaling, soft-capping, adapters) is the model's own code, run on the hidden
                      states of a chunk; beyond FREE logits it runs again in the backward pass: 8NVH

A model's forward is given the places and targets of what is supervised, so that all of this happens inside whatever is
wrapped around it: adapters, autocast, DDP, FSDP.

Shapes: N supervised tokens, U places that predict them (in trees one may predict several), C of those in a chunk, H hidden
size, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from snaketune.models import fused_cross_entropy
from snaketune.models.fused_cross_entropy import SummedLosses, TokenLosses, target_logits


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """What a forward is asked for in the place of logits.

    Attributes:
        sources_U: places that predict, each once.
        rows_N: which of them predicts each token; None where each predicts one, in order.
        targets_N: the tokens.
        summed: one number for all of them, or one each.
    """

    sources_U: torch.Tensor
    rows_N: torch.Tensor | None
    targets_N: torch.Tensor
    summed: bool


class _Reached(Exception):
    """What the decoder gave; nothing after it needs to run."""


def chunk_head(model: PreTrainedModel, inputs: dict[str, Any], places_N: torch.Tensor) -> bool:
    """Let `model`'s forward take a `supervised`, if what lies behind its decoder can be run by itself.

    Args:
        inputs, places_N: of a forward that shows it, by logits at some places.
    Returns:
        Whether it can; else it isn't changed.
    """
    if hasattr(model, "whole_forward"):
        return True
    with torch.no_grad():
        try:
            outputs = _decoded(model, model.forward, inputs)
            hidden_CH = outputs[0][0, places_N]
            found = _logits(model, model.forward, outputs, hidden_CH, inputs)
            expected = model(**inputs).logits[0, places_N]
        except (_Unreached, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
        if not _same(found, expected):
            return False
        model.head_is_product = _is_product(model, outputs, hidden_CH, inputs)
    model.whole_forward = model.forward
    # A bound method is copied with the model that it is bound to.
    model.forward = MethodType(_signed_as(type(model).forward), model)
    return True


@contextmanager
def whole_around_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the weights before and after the layers of a model in shards (FSDP2) are whole, as they are in its forward."""
    sharded = isinstance(model, FSDPModule)
    if sharded:
        model.unshard()
    try:
        yield
    finally:
        if sharded:
            model.reshard()


def _signed_as(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`_forward` with the signature of a class's own, from which generation reads what to hand on (positions, for one)."""
    return wraps(forward)(lambda *arguments, **inputs: _forward(*arguments, **inputs))


class _Unreached(Exception):
    """The model's decoder isn't what its forward calls."""


def _forward(
    model: PreTrainedModel, *arguments: Any, supervised: Supervised | None = None, **inputs: Any
) -> torch.Tensor | Any:
    """Negative log-probabilities of what is supervised, float32[N] or their sum; or what the forward gave before."""
    if supervised is None:
        return model.whole_forward(*arguments, **inputs)
    outputs = _decoded(model, model.whole_forward, inputs)
    hidden_UH = outputs[0][0].index_select(0, supervised.sources_U)
    head = _trained(model.get_output_embeddings())
    # Adapters may have been put around it since it was looked at.
    product = model.head_is_product and type(head) is torch.nn.Linear
    passes = fused_cross_entropy.fused() if getattr(model, "fused_head", False) else fused_cross_entropy.EAGER
    if product and supervised.summed and supervised.rows_N is None:
        return SummedLosses.apply(hidden_UH, head.weight, supervised.targets_N, passes)
    # ZeRO gathers weights for modules alone, and lets go of them before the backward pass.
    if product and not hasattr(head.weight, "ds_id"):
        rows_N = supervised.rows_N
        if rows_N is None:
            rows_N = torch.arange(len(hidden_UH), device=hidden_UH.device)
        losses_N = TokenLosses.apply(
            hidden_UH, head.weight, rows_N, supervised.targets_N, torch.is_grad_enabled(), passes
        )
    else:
        losses_N = _one_by_one(
            lambda hidden_CH: _logits(model, model.whole_forward, outputs, hidden_CH, inputs),
            hidden_UH,
            supervised,
            model.config.get_text_config().vocab_size,
        )
    return losses_N.sum() if supervised.summed else losses_N


def _trained(head: torch.nn.Module) -> torch.nn.Module:
    """What computes: of a head that is trained whole beside adapters, its copy."""
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies["default"]


def _decoded(model: PreTrainedModel, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """What the decoder gives in a forward, the head left out."""

    def stop(module: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        raise _Reached(outputs)

    hook = _decoder(model).register_forward_hook(stop)
    try:
        forward(**inputs)
    except _Reached as reached:
        return reached.args[0]
    finally:
        hook.remove()
    raise _Unreached


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    found = model.get_decoder()
    # Llama 4's doesn't know its own.
    found = getattr(model, "model", model) if found is model else found
    if found is model:
        raise _Unreached
    return found


def _logits(
    model: PreTrainedModel, forward: Callable[..., Any], outputs: Any, hidden_CH: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """[C, V]: the model's own forward, its decoder giving these hidden states."""
    if isinstance(outputs, tuple):
        given = (hidden_CH[None], *outputs[1:])
    else:
        given = copy.copy(outputs)
        given.last_hidden_state = hidden_CH[None]
    decoder = _decoder(model)
    kept = decoder.__dict__.get("forward")
    decoder.forward = lambda *_, **__: given
    try:
        return forward(**inputs).logits[0]
    finally:
        if kept is None:
            del decoder.forward
        else:
            decoder.forward = kept


def _is_product(model: PreTrainedModel, outputs: Any, hidden_CH: torch.Tensor, inputs: dict[str, Any]) -> bool:
    """Whether logits are hidden states times the head's weight and nothing else."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return False
    # Large enough for a soft cap to show.
    large_CH = hidden_CH * (50 / F.linear(hidden_CH, head.weight).std().clamp(min=1e-6))
    found = _logits(model, model.forward, outputs, large_CH, inputs)
    return _same(found, F.linear(large_CH, head.weight))


def _same(one_CV: torch.Tensor, other_CV: torch.Tensor) -> bool:
    """But for the rounding of matrix products of other shapes."""
    if one_CV.shape != other_CV.shape:
        return False
    rounding = {torch.float32: 1e-4}.get(other_CV.dtype, 5e-3)
    return bool((one_CV - other_CV).abs().max() <= rounding * other_CV.abs().max())


def _one_by_one(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden_UH: torch.Tensor, supervised: Supervised, vocabulary: int
) -> torch.Tensor:
    def losses(hidden_CH: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What normalizes the logits of a chunk's places, [C]; and the target's logit of each token, [N], 0 in other chunks."""
        logits_CV = logits_of(hidden_CH).float()
        return logits_CV.logsumexp(1), target_logits(logits_CV, begin, supervised.rows_N, supervised.targets_N)

    def plain(hidden_CH: torch.Tensor, begin: int) -> torch.Tensor:
        """Where each place predicts one token, in order."""
        targets_C = supervised.targets_N[begin : begin + len(hidden_CH)]
        return F.cross_entropy(logits_of(hidden_CH).float(), targets_C, reduction="none")

    once = supervised.rows_N is None
    rows = max(fused_cross_entropy.FREE // vocabulary, fused_cross_entropy.FEWEST_ROWS)
    found = [
        checkpoint(plain if once else losses, hidden_CH, at * rows, use_reentrant=False)
        if len(hidden_UH) > rows
        else (plain if once else losses)(hidden_CH, 0)
        for at, hidden_CH in enumerate(hidden_UH.split(rows))
    ]
    if once:
        return torch.cat(found)
    normalizers, of_targets = zip(*found)
    return torch.cat(normalizers).index_select(0, supervised.rows_N) - torch.stack(of_targets).sum(0)
