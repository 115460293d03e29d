"""Attention over segments, as one function that transformers' models call, with interchangeable kernels.

The B rows of a batch are laid end to end into one sequence of T tokens; `Segments` tells every kernel who sees whom.

    kernel             where                                   work
    flash_attention_4  CUDA, compute capability 9 and up       exactly the visible pairs
    flash_attention_2  CUDA, with flash-attn installed         exactly the visible pairs
    varlen             CUDA, torch's own varlen_attn           exactly the visible pairs
    sdpa               everywhere                              segments in rectangles of similar length
    dense              everywhere, the reference               all T x T pairs

Shapes: T tokens, S segments, H query heads, K key/value heads, D head size, n segments in a rectangle of width W.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_4_available

from snaketune.errors import SnaketuneError
from snaketune.packing.segments import Layout, causal_buckets, mask, varlen_keys

NAME = "snaketune_segments"


@dataclass(frozen=True, kw_only=True)
class Segments:
    """A batch's layout, and of it the tensors that its kernel reads. Moves between devices like a tensor.

    Attributes:
        kernel: one of KERNELS.
        positions_T: see `packing.segments.Layout`.
        buckets_nW, where_T: for `sdpa`, see `packing.segments.causal_buckets`.
        mask_TT: for `dense`, see `packing.segments.mask`.
        keys_U, cu_q, cu_k: for the varlen kernels, see `packing.segments.varlen_keys`.
    """

    kernel: str
    layout: Layout
    positions_T: torch.Tensor
    buckets_nW: tuple[torch.Tensor, ...] = ()
    where_T: torch.Tensor | None = None
    mask_TT: torch.Tensor | None = None
    keys_U: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Segments":
        """A copy in memory that a GPU reads by itself; torch's data loader calls this."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Segments":
        def changed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return change(value)
            return tuple(changed(item) for item in value) if isinstance(value, tuple) else value

        return Segments(**{field.name: changed(getattr(self, field.name)) for field in fields(self)})


def segments_for(kernel: str, rows: Layout) -> Segments:
    """The layout as `kernel` wants it, on the CPU."""
    arrays: dict[str, Any]
    if kernel == "sdpa":
        buckets, where = causal_buckets(rows)
        arrays = {"buckets_nW": tuple(map(torch.from_numpy, buckets)), "where_T": torch.from_numpy(where)}
    elif kernel == "dense":
        arrays = {"mask_TT": torch.from_numpy(mask(rows))}
    else:
        arrays = dict(zip(("keys_U", "cu_q", "cu_k"), map(torch.from_numpy, varlen_keys(rows))))
    return Segments(kernel=kernel, layout=rows, positions_T=torch.from_numpy(rows.positions), **arrays)


def choose_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """The fastest kernel that this device, data type and installation support."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    major, _ = torch.cuda.get_device_capability(device)
    if major >= 9 and is_flash_attn_4_available():
        return "flash_attention_4"
    if major >= 8:
        return "flash_attention_2" if is_flash_attn_2_available() else "varlen"
    return "sdpa"


class Unpackable(SnaketuneError):
    """This model can't see packed rows as it sees each document alone."""


def use_segment_attention(model: PreTrainedModel) -> None:
    """Make `model` attend over the `segments` that its forward is given. `models.selftest` shows whether that is enough.

    A model whose attention is code of its own keeps it: some tell documents apart by their positions.

    Raises:
        Unpackable: the model refuses.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    if not model._can_set_attn_implementation():
        return
    if model.config._attn_implementation != NAME:
        model.own_attention = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise Unpackable(str(error).splitlines()[0]) from None


def use_own_attention(model: PreTrainedModel) -> None:
    """Undo `use_segment_attention`: the attention that the model was loaded with."""
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation(model.own_attention)


# What layers hand to an attention function without meaning anything by it here.
NEUTRAL = {"position_ids", "cache_position", "use_cache", "return_dict", "is_causal"}


def attend(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' layers call.

    Returns:
        [1, T, H, D], and None in the place of attention weights.
    Raises:
        Unpackable: the layer asks for more than softmax over the visible tokens, or a segment is longer than the model's
            sliding window, which no kernel here cuts off.
    """
    layer = type(module).__name__
    if segments is None:
        raise Unpackable(f"{layer} doesn't hand on the segments of a packed row")
    if attention_mask is not None:
        raise Unpackable(f"{layer} masks or weighs tokens by itself (attention_mask), which packed rows don't have")
    if not others.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise Unpackable(f"{layer} lets tokens see what follows them (is_causal)")
    asked = (name for name, value in others.items() if value is not None and value is not False)
    if unknown := sorted(name for name in asked if name not in NEUTRAL and not name.startswith("output_")):
        raise Unpackable(f"{layer} asks for {', '.join(unknown)}, which no kernel here has")
    if sliding_window and segments.layout.longest > sliding_window:
        raise Unpackable(beyond_window(segments.layout.longest, sliding_window))
    kernel: Callable[..., torch.Tensor] = KERNELS[segments.kernel]
    return kernel(query_1HTD, key_1KTD, value_1KTD, segments, scaling, dropout), None


def beyond_window(longest: int, window: int) -> str:
    """The sentence for a segment that is longer than what a layer sees."""
    return (
        f"a sequence of {longest} tokens is longer than the model's attention window of {window}; "
        "lower packing.length to that"
    )


def _sdpa(query, key, value, segments: Segments, scaling: float | None, dropout: float) -> torch.Tensor:
    """Rectangles of segments through causal scaled_dot_product_attention.

    Prefix tokens are gathered in front of a segment's own, so that the causal triangle is the whole mask; what the prefix's
    queries give there is dropped by `where_T`.
    """
    query_THD, key_TKD, value_TKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    grouped = query_THD.shape[1] != key_TKD.shape[1]
    outputs = []
    for tokens_nW in segments.buckets_nW:
        n, width = tokens_nW.shape
        query_nHWD, key_nKWD, value_nKWD = (
            tensor.index_select(0, tokens_nW.reshape(-1)).unflatten(0, (n, width)).transpose(1, 2)
            for tensor in (query_THD, key_TKD, value_TKD)
        )
        out_nHWD = F.scaled_dot_product_attention(
            query_nHWD, key_nKWD, value_nKWD, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out_nHWD.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.where_T)[None]


def _dense(query, key, value, segments: Segments, scaling: float | None, dropout: float) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    out_1HTD = F.scaled_dot_product_attention(
        query, key, value, attn_mask=segments.mask_TT, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out_1HTD.transpose(1, 2)


def _packed_tensors(query, key, value, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, H, D] queries, and the keys and values [U, K, D] of every segment with its prefix.

    Under autocast with float32 weights, rotary embeddings lift queries and keys to float32, which these kernels don't take;
    the values still have the data type of the computation.
    """
    query_THD = query[0].transpose(0, 1).to(value.dtype).contiguous()
    key_UKD, value_UKD = (
        tensor[0].transpose(0, 1).to(value.dtype).index_select(0, segments.keys_U) for tensor in (key, value)
    )
    return query_THD, key_UKD, value_UKD


def _varlen(query, key, value, segments: Segments, scaling: float | None, dropout: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise SnaketuneError("torch's varlen attention has no dropout; set the model's attention_dropout to 0")
    query_THD, key_UKD, value_UKD = _packed_tensors(query, key, value, segments)
    return varlen_attn(
        query_THD,
        key_UKD,
        value_UKD,
        segments.cu_q,
        segments.cu_k,
        segments.layout.widest,
        segments.layout.widest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query_THD.shape[1] != key_UKD.shape[1],
    )[None]


def _flash_2(query, key, value, segments: Segments, scaling: float | None, dropout: float) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    query_THD, key_UKD, value_UKD = _packed_tensors(query, key, value, segments)
    return flash_attn_varlen_func(
        query_THD,
        key_UKD,
        value_UKD,
        segments.cu_q,
        segments.cu_k,
        segments.layout.widest,
        segments.layout.widest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
    )[None]


def _flash_4(query, key, value, segments: Segments, scaling: float | None, dropout: float) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    if dropout:
        raise SnaketuneError("flash-attn 4 has no dropout; set the model's attention_dropout to 0")
    query_THD, key_UKD, value_UKD = _packed_tensors(query, key, value, segments)
    out = flash_attn_varlen_func(
        query_THD,
        key_UKD,
        value_UKD,
        cu_seqlens_q=segments.cu_q,
        cu_seqlens_k=segments.cu_k,
        max_seqlen_q=segments.layout.widest,
        max_seqlen_k=segments.layout.widest,
        softmax_scale=scaling,
        causal=True,
    )
    return (out[0] if isinstance(out, tuple) else out)[None]


KERNELS = {
    "sdpa": _sdpa,
    "dense": _dense,
    "varlen": _varlen,
    "flash_attention_2": _flash_2,
    "flash_attention_4": _flash_4,
}
