"""Interchangeable attention kernels over segments, and their inputs.

The rows of a batch are concatenated into one sequence of T tokens; `Segments` describes which tokens are visible to which.

    kernel             where                                   work
    flash_attention_4  CUDA, compute capability 9 and up       exactly the visible pairs
    flash_attention_2  CUDA, with flash-attn installed         exactly the visible pairs
    varlen             CUDA, torch's own varlen_attn           exactly the visible pairs
    sdpa               everywhere                              a call per segment
    dense              everywhere, the reference               all T x T pairs
    separate           everywhere, without segments            each document a sequence of its own, padded on the right

`separate` isn't an attention kernel: the model's own attention runs on `padded_documents`. It is right for every causal
decoder, and serves those that no kernel computes as they compute each document alone.

With prefixes, the keys of every segment's full sequence are gathered. Shapes: T tokens, H query heads, K key/value heads,
D head size, U keys of all segments' full sequences; for one segment Q queries, W keys.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from snaketune.engine.model.padded_documents import PaddedDocuments
from snaketune.engine.model.varlen_sinks import AttentionWithSinks
from snaketune.engine.packing.segments import PADDING_SEGMENT, SegmentLayout, layout, mask, varlen_keys
from snaketune.errors import SnaketuneError


class Unpackable(SnaketuneError):
    """A model or kernel doesn't compute packed rows as it computes each document alone."""


# Not frozen: torch 2.11 copies a frozen dataclass at a graph break, and recompiles for its contents.
@dataclass(kw_only=True, eq=False)
class Segments:
    """A batch's layout, and the kernel's inputs derived from it. Moves between devices like a tensor.

    Attributes:
        kernel: one of KERNELS, or SEPARATE.
        longest: tokens of the longest document with its prefix, or an upper bound that all batches of a run share.
        mask_TT: for `dense`, see `engine.packing.segments.mask`.
        keys_U: for `sdpa` and the varlen kernels; None without prefixes. See `engine.packing.segments.varlen_keys`.
        cu_q, cu_k: for the varlen kernels, see `engine.packing.segments.varlen_keys`.
        compute: in place of the kernel's function, in forwards that only observe what layers ask of it.
    """

    kernel: str
    layout: SegmentLayout
    longest: int
    positions_T: torch.Tensor
    mask_TT: torch.Tensor | None = None
    keys_U: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    compute: Callable[..., torch.Tensor] | None = None
    _padded: PaddedDocuments | None = field(default=None, init=False, repr=False)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Segments":
        return self._map_tensors(torch.Tensor.pin_memory)

    def padded(self, boundary: int | None = None) -> PaddedDocuments:
        """Return the documents as padded sequences, made once, where the segments are. `boundary`: see `PaddedDocuments.of`."""
        if self._padded is None:
            self._padded = PaddedDocuments.of(self.layout, self.positions_T.device, boundary)
        return self._padded

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Segments":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


def segments_for(kernel: str, rows: SegmentLayout, longest: int | None = None, any_prefixes: bool = False) -> Segments:
    """Return the inputs of `kernel` for the layout `rows`, on the CPU. `longest`: tokens of the run's longest document with
    its prefix, by default that of these rows. `any_prefixes`: whether any batch of the run may have prefixes: varlen
    kernels then get keys_U in every batch, since layers would be compiled both with and without."""
    longest = rows.longest if longest is None else longest
    segments = Segments(kernel=kernel, layout=rows, longest=longest, positions_T=torch.from_numpy(rows.positions))
    if kernel == SEPARATE:
        return segments
    if kernel == "dense":
        return replace(segments, mask_TT=torch.from_numpy(mask(rows)))
    if kernel == "sdpa":
        return replace(segments, keys_U=torch.from_numpy(varlen_keys(rows)[0]) if rows.prefixed else None)
    keys_U, cu_q, cu_k = map(torch.from_numpy, varlen_keys(rows))
    keys_U = keys_U if rows.prefixed or any_prefixes else None
    return replace(segments, longest=max(longest, PADDING_SEGMENT), keys_U=keys_U, cu_q=cu_q, cu_k=cu_k)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of a layer's attention: factor of the logits (None for 1 / sqrt(D)), dropout of attention weights, sliding
    window in tokens, the query included (None if no segment is longer), cap of the logits (x becomes softcap *
    tanh(x / softcap)), and sinks [H]: logits of one key more, without a value, for each head (gpt-oss)."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    sinks_H: torch.Tensor | None = field(default=None, compare=False)

    @property
    def explicit(self) -> bool:
        """Whether torch's own attention functions can't compute it."""
        return bool(self.softcap or self.has_sinks)


def _torch_attention(query, key, value, options: AttentionOptions, **masked) -> torch.Tensor:
    if options.explicit:
        return _explicit_attention(query, key, value, options, **masked)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        **masked,
    )


def _explicit_attention(
    query_1HQD, key_1KWD, value_1KWD, options: AttentionOptions, attn_mask=None, is_causal=False
) -> torch.Tensor:
    """Return attention with all its Q x W logits in memory, which may be capped and have a sink; as `_torch_attention`."""
    heads, queries, width = query_1HQD.shape[1], query_1HQD.shape[2], key_1KWD.shape[2]
    key_1HWD, value_1HWD = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key_1KWD, value_1KWD))
    scaling = query_1HQD.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    logits_1HQW = (query_1HQD @ key_1HWD.transpose(2, 3) * scaling).float()
    if options.softcap:
        logits_1HQW = options.softcap * torch.tanh(logits_1HQW / options.softcap)
    visible = torch.ones(queries, width, dtype=torch.bool, device=query_1HQD.device).tril() if is_causal else attn_mask
    logits_1HQW = logits_1HQW.masked_fill(~visible, -torch.inf)
    if options.has_sinks:
        sink_1HQ1 = options.sinks_H.float().reshape(1, -1, 1, 1).expand(1, heads, queries, 1)
        logits_1HQW = torch.cat([logits_1HQW, sink_1HQ1], dim=3)
    weights_1HQW = logits_1HQW.softmax(3)[..., :width].to(value_1KWD.dtype)
    return F.dropout(weights_1HQW, options.dropout) @ value_1HWD


def _sdpa(query_1HTD, key_1KTD, value_1KTD, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    queries = query_1HTD.split(segments.layout.lengths.tolist(), dim=2)
    if segments.keys_U is not None:
        key_1KTD, value_1KTD = (tensor.index_select(2, segments.keys_U) for tensor in (key_1KTD, value_1KTD))
    keys, values = (tensor.split(segments.layout.sequence_lengths.tolist(), dim=2) for tensor in (key_1KTD, value_1KTD))
    return torch.cat([_causal(*parts, options).transpose(1, 2) for parts in zip(queries, keys, values, strict=True)], 1)


def _causal(query_1HQD, key_1KWD, value_1KWD, options: AttentionOptions) -> torch.Tensor:
    """Return causal attention [1, H, Q, D] of the last Q of W tokens. With a sliding window of w tokens, blocks of w
    queries run against the at most 2w - 1 keys that any of them sees."""
    queries, width = query_1HQD.shape[2], key_1KWD.shape[2]
    window = min(options.window or width, width)
    if window == queries == width:
        return _torch_attention(query_1HQD, key_1KWD, value_1KWD, options, is_causal=True)
    offset, blocks = width - queries, []
    index = torch.arange(width, device=query_1HQD.device)
    for start in range(0, queries, window):
        stop = min(start + window, queries)
        seen = slice(max(offset + start - window + 1, 0), offset + stop)
        distance = index[offset + start : offset + stop, None] - index[seen]
        visible = (distance >= 0) & (distance < window)
        parts = query_1HQD[:, :, start:stop], key_1KWD[:, :, seen], value_1KWD[:, :, seen]
        blocks.append(_torch_attention(*parts, options, attn_mask=visible))
    return torch.cat(blocks, dim=2)


def _dense(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    visible_TT = segments.mask_TT
    if options.window:
        visible_TT = visible_TT & (segments.positions_T[:, None] - segments.positions_T < options.window)
    return _torch_attention(query, key, value, options, attn_mask=visible_TT).transpose(1, 2)


def _varlen_inputs(query, key, value, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, H, D], and keys and values [U, K, D] of every segment with its prefix; without prefixes U is T.

    Values with smaller heads than keys (DeepSeek) are padded with zeros, which the caller removes from the output. All three
    are cast to the compute data type, since these kernels take 16 bits only: under autocast, rotary embeddings return float32
    queries and keys, and 4-bit layers return the float32 of the residual stream.
    """
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    missing = query.shape[-1] - value.shape[-1]
    value = F.pad(value, (0, missing)) if missing else value
    query_THD, key_UKD, value_UKD = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    if segments.keys_U is not None:
        key_UKD, value_UKD = (tensor.index_select(0, segments.keys_U) for tensor in (key_UKD, value_UKD))
    return query_THD.contiguous(), key_UKD.contiguous(), value_UKD.contiguous()


def _varlen(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    inputs, window = _varlen_inputs(query, key, value, segments), options.window - 1 if options.window else -1
    if options.has_sinks:
        # The self-test comes before any compilation, so compiled code needs no check.
        if not torch.compiler.is_compiling() and (error := _gradient_error(inputs[0].device, inputs[0].dtype)) > 2e-2:
            raise Unpackable(f"gradients of attention with sinks by kernel varlen are wrong by {error:.1e}")
        out_THD = _varlen_with_sinks(*inputs, segments, options, window)
    else:
        out_THD = varlen_attn(
            *inputs,
            segments.cu_q,
            segments.cu_k,
            segments.longest,
            segments.longest,
            scale=options.scaling,
            window_size=(window, 0),
            **ENABLE_GQA,
        )
    return out_THD[None, ..., : value.shape[-1]]


def _varlen_with_sinks(query_THD, key_UKD, value_UKD, segments: Segments, options: AttentionOptions, window: int):
    scale = query_THD.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    others = segments.cu_q, segments.cu_k, segments.longest, scale, window
    return AttentionWithSinks.apply(query_THD, key_UKD, value_UKD, options.sinks_H.float(), *others)


@cache
def _gradient_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest relative difference of gradients by the varlen kernel with sinks from those of `dense` in float32.

    Once per process, on random tensors: the self-test compares no gradients, and torch doesn't document what its kernel's
    backward reads.
    """
    rows, generator = layout([[150, 42]], [[0, 0]], row_lengths=[192]), torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, rows.tokens, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]
    sinks_H = torch.linspace(-1.0, 4.0, 4, device=device)

    def gradients(kernel: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        *inputs, grad = (tensor.to(dtype) for tensor in tensors)
        trained = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, sinks_H)]
        options = AttentionOptions(window=37, has_sinks=True, sinks_H=trained[-1])
        segments = segments_for(kernel, rows).to(device)
        if kernel == "dense":
            out = _dense(*trained[:3], segments, options)
        else:
            out = _varlen_with_sinks(*_varlen_inputs(*trained[:3], segments), segments, options, 36)[None]
        return torch.autograd.grad(out, trained, grad.transpose(1, 2))

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        pairs = zip(gradients("varlen", dtype), gradients("dense", torch.float32), strict=True)
        return max(((actual.float() - expected).norm() / expected.norm()).item() for actual, expected in pairs)


def _flash(
    function: Callable, query, key, value, segments: Segments, options: AttentionOptions, **limits
) -> torch.Tensor:
    """Call flash-attn's `function`, of which both generations take these arguments; `limits` are those of one of them."""
    query_THD, key_UKD, value_UKD = _varlen_inputs(query, key, value, segments)
    out = function(
        query_THD,
        key_UKD,
        value_UKD,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.longest,
        max_seqlen_k=segments.longest,
        softmax_scale=options.scaling,
        causal=True,
        softcap=options.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **limits,
    )
    return (out[0] if isinstance(out, tuple) else out)[None, ..., : value.shape[-1]]


def _flash_2(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    limits = {"window_size": (options.window - 1 if options.window else -1, -1), "dropout_p": options.dropout}
    return _flash(flash_attn_varlen_func, query, key, value, segments, options, **limits)


def _flash_4(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    window = (options.window - 1 if options.window else None, None)
    return _flash(flash_attn_varlen_func, query, key, value, segments, options, window_size=window)


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": _sdpa,
    "dense": _dense,
    "varlen": _varlen,
    "flash_attention_2": _flash_2,
    "flash_attention_4": _flash_4,
}
# torch 2.13 needs this argument for fewer key than query heads; 2.11 lacks it. Inspected at import, before any compilation.
ENABLE_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# The value of a kernel for documents that run separately.
SEPARATE = "separate"
# Kernels that run uncompiled: their calls and shapes vary from batch to batch, or torch.compile can't trace their code.
NOT_COMPILED = {"sdpa", "flash_attention_4"}
# Kernels for which varying batch shapes cost nothing: padding is removed before the forward pass.
ANY_SHAPE = {"sdpa", SEPARATE}
# Limits of kernels; sources: torch's flash_api.cpp (2.11), flash-attn 2.8.3, flash-attn-4 4.0.0b36, whose support for larger
# heads depends on the GPU. Those without dropout of attention weights; those that cap attention logits, as Gemma 2 needs; those
# with sinks; and the largest head size, with the divisor of every supported one.
WITHOUT_DROPOUT = {"varlen", "flash_attention_4"}
SOFTCAP_KERNELS = ("flash_attention_2", "flash_attention_4", "sdpa", "dense")
SINK_KERNELS = ("varlen", "sdpa", "dense")
HEAD_SIZES = {"varlen": (256, 8), "flash_attention_2": (256, 1), "flash_attention_4": (128, 8)}


def refusal(kernel: str, head_size: int, options: AttentionOptions) -> str:
    """Return why a kernel doesn't support a layer's attention; empty if it does.

    >>> refusal("varlen", 80, AttentionOptions()), refusal("varlen", 64, AttentionOptions(dropout=0.1))
    ('', 'kernel varlen has no dropout of attention weights (0.1)')
    >>> refusal("varlen", 100, AttentionOptions())
    'kernel varlen takes head sizes that are a multiple of 8 up to 256, not 100'
    """
    if options.softcap and kernel not in SOFTCAP_KERNELS:
        return f"its attention is soft-capped, which kernel {kernel} doesn't support ({', '.join(SOFTCAP_KERNELS)} do)"
    if options.has_sinks and kernel not in SINK_KERNELS:
        return f"its attention has sinks, which kernel {kernel} doesn't support ({', '.join(SINK_KERNELS)} do)"
    if options.dropout and kernel in WITHOUT_DROPOUT:
        return f"kernel {kernel} has no dropout of attention weights ({options.dropout:g})"
    largest, multiple = HEAD_SIZES.get(kernel, (head_size, 1))
    if head_size > largest or head_size % multiple:
        multiples = f"that are a multiple of {multiple} " if multiple > 1 else ""
        return f"kernel {kernel} takes head sizes {multiples}up to {largest}, not {head_size}"
    return ""
