"""Attention over segments as one function that transformers' models call; `models.kernels` holds what computes it."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_4_available

from snaketune.models.kernels import KERNELS, Asked, Segments, Unpackable, refusal

NAME = "snaketune_segments"
# Where kernels are imported from that aren't torch's.
PACKAGED = {"flash_attention_2": "flash_attn", "flash_attention_4": "flash_attn.cute"}


def usable_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Kernels that this device, data type and installation support, the fastest first; the last is sdpa, for any head size."""
    packaged = [kernel for kernel in installed_kernels(device, dtype) if not load_trouble(kernel)]
    return [*packaged, *(["varlen"] if _has_varlen(device, dtype) else []), "sdpa"]


def installed_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Kernels of installed packages for such a device, the fastest first; whether they load is another question."""
    if not _has_varlen(device, dtype):
        return []
    major, _ = torch.cuda.get_device_capability(device)
    four = ["flash_attention_4"] if major >= 9 and is_flash_attn_4_available() else []
    return four + (["flash_attention_2"] if is_flash_attn_2_available() else [])


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


@cache
def load_trouble(kernel: str) -> str:
    """Why an installed kernel doesn't load, as one that was built for another torch; empty if it does."""
    try:
        getattr(import_module(PACKAGED[kernel]), "flash_attn_varlen_func")  # noqa: B009
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return ""


def use_segment_attention(model: PreTrainedModel) -> None:
    """Make `model` attend over the `segments` that its forward is given. `models.selftest` shows whether that is enough.

    A model whose attention is code of its own keeps it: some tell documents apart by their positions.

    Raises:
        Unpackable: the model refuses.
    """
    use_attention(model, attend)


def use_attention(model: PreTrainedModel, function: Callable[..., Any]) -> None:
    """The same with another function in the place of `attend`."""
    # No mask function beside it: with one, transformers asks the device in every forward pass whether there are documents.
    AttentionInterface.register(NAME, function)
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
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' layers call.

    Returns:
        [1, T, H, D], and None in the place of attention weights.
    Raises:
        Unpackable: the layer asks for more than the kernel can do.
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
    # Where nothing is longer than the window, there is none.
    window = sliding_window if sliding_window and segments.longest > sliding_window else None
    kernel: Callable[..., torch.Tensor] = KERNELS[segments.kernel]
    asked_for = Asked(scaling=scaling, dropout=dropout, window=window, softcap=softcap)
    if reason := refusal(segments.kernel, query_1HTD.shape[-1], asked_for):
        raise Unpackable(f"{layer}: {reason}")
    return kernel(query_1HTD, key_1KTD, value_1KTD, segments, asked_for), None
