"""Interchangeable attention kernels over segments, and their inputs.

The rows of a batch are concatenated into one sequence of T tokens; `Segments` describes which tokens are visible to which.

    kernel             where                                   work
    flash_attention_4  CUDA, compute capability 9 and up       exactly the visible pairs
    flash_attention_2  CUDA, with flash-attn installed         exactly the visible pairs
    varlen             CUDA, torch's own varlen_attn           exactly the visible pairs
    sdpa               everywhere                              a causal call per segment, and one per prefix (CPU)
    dense              everywhere, the reference               all T x T pairs

Without prefixes, every kernel takes queries, keys and values in place. With prefixes, the keys of every segment's full sequence
are gathered; on a CPU, sdpa reads them in place (`models.cpu_attention`), unless attention weights are dropped. Where a layer
has a sliding window of w tokens (a token itself and the w - 1 before it), kernels with window support receive it; sdpa runs
blocks of w queries against the at most 2w - 1 keys that any of them sees.

Shapes: T tokens, S segments, H query heads, K key/value heads, D head size, U keys of all segments' full sequences; for one
segment Q queries, W keys.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from snaketune.errors import SnaketuneError
from snaketune.models.cpu_attention import Block, attend_by_blocks, attention_blocks, can_attend
from snaketune.packing.segments import PADDING_SEGMENT, SegmentLayout, mask, varlen_keys


class Unpackable(SnaketuneError):
    """A model or kernel doesn't compute packed rows as it computes each document alone."""


# Not frozen: torch 2.11 copies a frozen dataclass at a graph break, and recompiles for its contents.
@dataclass(kw_only=True, eq=False)
class Segments:
    """A batch's layout, and the kernel's inputs derived from it. Moves between devices like a tensor.

    Attributes:
        kernel: one of KERNELS.
        longest: tokens of the longest document with its prefix, or an upper bound that all batches of a run share.
        positions_T: see `packing.segments.SegmentLayout`.
        blocks: for `sdpa` on a CPU, see `models.cpu_attention`.
        mask_TT: for `dense`, see `packing.segments.mask`.
        keys_U: for `sdpa` and the varlen kernels, see `packing.segments.varlen_keys`; None without prefixes.
        cu_q, cu_k: for the varlen kernels, see `packing.segments.varlen_keys`.
    """

    kernel: str
    layout: SegmentLayout
    longest: int
    positions_T: torch.Tensor
    blocks: tuple[Block, ...] = ()
    mask_TT: torch.Tensor | None = None
    keys_U: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        """Return a copy on `device`."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Segments":
        """Return a copy in pinned memory."""
        return self._map_tensors(torch.Tensor.pin_memory)

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Segments":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **changed)


def segments_for(kernel: str, rows: SegmentLayout, longest: int | None = None, any_prefixes: bool = False) -> Segments:
    """Return the inputs of `kernel` for the layout `rows`, on the CPU.

    Args:
        longest: tokens of the run's longest document with its prefix; default: that of these rows.
        any_prefixes: whether any batch of the run may have prefixes: varlen kernels then get keys_U in every batch, since
            layers would be compiled both with and without.
    """
    arrays: dict[str, Any]
    longest = rows.longest if longest is None else longest
    if kernel == "sdpa":
        arrays = {"blocks": attention_blocks(rows)}
        arrays |= {"keys_U": torch.from_numpy(varlen_keys(rows)[0])} if rows.prefixed else {}
    elif kernel == "dense":
        arrays = {"mask_TT": torch.from_numpy(mask(rows))}
    else:
        keys, cu_q, cu_k = map(torch.from_numpy, varlen_keys(rows))
        arrays = {"cu_q": cu_q, "cu_k": cu_k} | ({"keys_U": keys} if rows.prefixed or any_prefixes else {})
        longest = max(longest, PADDING_SEGMENT)
    return Segments(kernel=kernel, layout=rows, longest=longest, positions_T=torch.from_numpy(rows.positions), **arrays)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of a layer's attention.

    Attributes:
        scaling: factor of the logits; None for 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        window: size of the sliding window in tokens, the query included; None if no segment is longer.
        softcap: cap of the logits: x becomes softcap * tanh(x / softcap).
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


def _sdpa(query_1HTD, key_1KTD, value_1KTD, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    if can_attend(query_1HTD, value_1KTD) and not options.dropout and options.window is None:
        return attend_by_blocks(query_1HTD, key_1KTD, value_1KTD, segments.blocks, options.scaling)
    queries = query_1HTD.split(segments.layout.lengths.tolist(), dim=2)
    if segments.keys_U is not None:
        key_1KTD, value_1KTD = (tensor.index_select(2, segments.keys_U) for tensor in (key_1KTD, value_1KTD))
    keys, values = (tensor.split(segments.layout.sequence_lengths.tolist(), dim=2) for tensor in (key_1KTD, value_1KTD))
    return torch.cat([_causal(*parts, options).transpose(1, 2) for parts in zip(queries, keys, values, strict=True)], 1)


def _causal(query_1HQD, key_1KWD, value_1KWD, options: AttentionOptions) -> torch.Tensor:
    """Return causal attention [1, H, Q, D] of the last Q of W tokens, within the sliding window if there is one."""
    arguments = {
        "dropout_p": options.dropout,
        "scale": options.scaling,
        "enable_gqa": query_1HQD.shape[1] != key_1KWD.shape[1],
    }
    queries, width = query_1HQD.shape[2], key_1KWD.shape[2]
    window = min(options.window or width, width)
    if window == queries == width:
        return F.scaled_dot_product_attention(query_1HQD, key_1KWD, value_1KWD, is_causal=True, **arguments)
    offset, blocks = width - queries, []
    for start in range(0, queries, window):
        stop = min(start + window, queries)
        key_start = max(offset + start - window + 1, 0)
        index = torch.arange(width, device=query_1HQD.device)
        distance = index[offset + start : offset + stop, None] - index[key_start : offset + stop]
        blocks.append(
            F.scaled_dot_product_attention(
                query_1HQD[:, :, start:stop],
                key_1KWD[:, :, key_start : offset + stop],
                value_1KWD[:, :, key_start : offset + stop],
                attn_mask=(distance >= 0) & (distance < window),
                **arguments,
            )
        )
    return torch.cat(blocks, dim=2)


def _dense(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    visible_TT = segments.mask_TT
    if options.window:
        visible_TT = visible_TT & (segments.positions_T[:, None] - segments.positions_T < options.window)
    out_1HTD = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible_TT,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_1HTD.transpose(1, 2)


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
    return varlen_attn(
        *_varlen_inputs(query, key, value, segments),
        segments.cu_q,
        segments.cu_k,
        segments.longest,
        segments.longest,
        scale=options.scaling,
        window_size=(options.window - 1 if options.window else -1, 0),
        **ENABLE_GQA,
    )[None, ..., : value.shape[-1]]


def _flash_2(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        *_varlen_inputs(query, key, value, segments),
        segments.cu_q,
        segments.cu_k,
        segments.longest,
        segments.longest,
        dropout_p=options.dropout,
        softmax_scale=options.scaling,
        causal=True,
        window_size=(options.window - 1 if options.window else -1, -1),
        softcap=options.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[None, ..., : value.shape[-1]]


def _flash_4(query, key, value, segments: Segments, options: AttentionOptions) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    query_THD, key_UKD, value_UKD = _varlen_inputs(query, key, value, segments)
    out = flash_attn_varlen_func(
        query_THD,
        key_UKD,
        value_UKD,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.longest,
        max_seqlen_k=segments.longest,
        softmax_scale=options.scaling,
        causal=True,
        window_size=(options.window - 1 if options.window else None, None),
        softcap=options.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return (out[0] if isinstance(out, tuple) else out)[None, ..., : value.shape[-1]]


KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa": _sdpa,
    "dense": _dense,
    "varlen": _varlen,
    "flash_attention_2": _flash_2,
    "flash_attention_4": _flash_4,
}
# torch 2.13 needs this argument for fewer key than query heads; 2.11 lacks it. Inspected at import, before any compilation.
ENABLE_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Limits of a kernel; sources: torch's flash_api.cpp (2.11), flash-attn 2.8.3, flash-attn-4 4.0.0b36.

    Attributes:
        head_size: largest head size; 0 for any.
        multiple: divisor of every supported head size.
        dropout, softcap: whether dropout of attention weights and soft-capping of logits are supported.
    """

    head_size: int = 0
    multiple: int = 1
    dropout: bool = True
    softcap: bool = False


LIMITS = {
    "sdpa": KernelLimits(),
    "dense": KernelLimits(),
    "varlen": KernelLimits(head_size=256, multiple=8, dropout=False),
    "flash_attention_2": KernelLimits(head_size=256, softcap=True),
    # Support for larger heads depends on the GPU; the other kernels support them on all GPUs.
    "flash_attention_4": KernelLimits(head_size=128, multiple=8, dropout=False, softcap=True),
}
# Kernels that cap attention logits, as Gemma 2 needs.
SOFTCAP_KERNELS = {kernel for kernel, limits in LIMITS.items() if limits.softcap}


def refusal(kernel: str, head_size: int, options: AttentionOptions) -> str:
    """Return why a kernel doesn't support a layer's attention; empty if it does.

    >>> refusal("varlen", 80, AttentionOptions()), refusal("varlen", 64, AttentionOptions(dropout=0.1))
    ('', 'kernel varlen has no dropout of attention weights (0.1)')
    >>> refusal("varlen", 100, AttentionOptions())
    'kernel varlen takes head sizes that are a multiple of 8 up to 256, not 100'
    """
    limits = LIMITS[kernel]
    if options.softcap and not limits.softcap:
        supported = " and ".join(sorted(SOFTCAP_KERNELS))
        return f"its attention is soft-capped, which kernel {kernel} doesn't support ({supported} do)"
    if options.dropout and not limits.dropout:
        return f"kernel {kernel} has no dropout of attention weights ({options.dropout:g})"
    if limits.head_size and (head_size > limits.head_size or head_size % limits.multiple):
        multiple = f"that are a multiple of {limits.multiple} " if limits.multiple > 1 else ""
        return f"kernel {kernel} takes head sizes {multiple}up to {limits.head_size}, not {head_size}"
    return ""


# Kernels that run uncompiled: their calls and shapes vary from batch to batch, or torch.compile can't trace their code.
NOT_COMPILED = {"sdpa", "flash_attention_4"}
# Kernels for which varying batch shapes cost nothing: padding is removed before the forward pass.
ANY_SHAPE = {"sdpa"}
