"""The attention function over segments that transformers' models call; `engine.model.kernels` implements it."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_4_available

from snaketune.engine.model.kernels import KERNELS, SEPARATE, AttentionOptions, Segments, Unpackable, refusal
from snaketune.engine.model.mixers import run_mixers_by_document, run_mixers_on_rows
from snaketune.errors import first_line

NAME = "snaketune_segments"
# Modules of the kernels that aren't part of torch.
KERNEL_MODULES = {"flash_attention_2": "flash_attn", "flash_attention_4": "flash_attn.cute"}
# Arguments that layers pass to attention functions and that change nothing here.
IGNORED_ARGUMENTS = {"position_ids", "cache_position", "use_cache", "return_dict", "is_causal"}


def usable_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the kernels that device, data type and installation support, fastest first; the last is always sdpa."""
    packaged = [kernel for kernel in installed_kernels(device, dtype) if not load_error(kernel)]
    return [*packaged, *["varlen"] * _has_varlen(device, dtype), "sdpa"]


def installed_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the kernels of installed packages that suit the device, fastest first; they may still fail to load."""
    if not _has_varlen(device, dtype):
        return []
    four = torch.cuda.get_device_capability(device)[0] >= 9 and is_flash_attn_4_available()
    return ["flash_attention_4"] * four + ["flash_attention_2"] * is_flash_attn_2_available()


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and in_16_bits and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def load_error(kernel: str) -> str:
    """Return why an installed kernel fails to load (for instance, it was built for another torch); empty if it loads."""
    try:
        getattr(import_module(KERNEL_MODULES[kernel]), "flash_attn_varlen_func")  # noqa: B009
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' layers call; it returns [1, T, H, D], and None instead of attention
    weights.

    Raises Unpackable if the layer requires something that the kernel doesn't support.
    """
    layer = type(module).__name__
    if segments is None:
        raise Unpackable(f"{layer} doesn't pass on the segments of a packed row")
    if attention_mask is not None:
        raise Unpackable(f"{layer} makes its own attention_mask, which packed rows don't support")
    if not others.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise Unpackable(f"{layer} isn't causal (is_causal): tokens attend to later ones")
    other_arguments = (name for name, value in others.items() if value is not None and value is not False)
    if unknown := sorted(
        name for name in other_arguments if name not in IGNORED_ARGUMENTS and not name.startswith("output_")
    ):
        raise Unpackable(f"{layer} needs {', '.join(unknown)}, which no kernel here supports")
    # A window longer than every segment has no effect.
    window = sliding_window if sliding_window and segments.longest > sliding_window else None
    sinks = {"has_sinks": s_aux is not None, "sinks_H": s_aux}
    options = AttentionOptions(scaling=scaling, dropout=dropout, window=window, softcap=softcap, **sinks)
    if reason := refusal(segments.kernel, query_1HTD.shape[-1], options):
        raise Unpackable(f"{layer}: {reason}")
    compute = segments.compute or KERNELS[segments.kernel]
    return compute(query_1HTD, key_1KTD, value_1KTD, segments, options), None


def use_segment_attention(model: PreTrainedModel, *, compiled: bool = True) -> None:
    """Make `model` attend over the `segments` argument of its forward; Unpackable if the model rejects it.

    A model whose attention can't be replaced keeps it: some separate documents by their positions. Layers with a state run by
    document.

    Args:
        compiled: whether torch.compile may trace the kernel, where it compiles the layers.
    """
    run_mixers_by_document(model)
    # Names without "flash", for which transformers fetches kernels. No mask function is registered: with one, transformers
    # synchronizes with the device to detect documents.
    name = NAME if compiled else f"{NAME}_uncompiled"
    AttentionInterface.register(name, attend if compiled else torch.compiler.disable(attend))
    if not model._can_set_attn_implementation():
        return
    if not _has_segment_attention(model):
        model.own_attention = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
    except ValueError as error:
        raise Unpackable(first_line(error)) from None


def _has_segment_attention(model: PreTrainedModel) -> bool:
    return (model.config._attn_implementation or "").startswith(NAME)


def use_own_attention(model: PreTrainedModel) -> None:
    """Undo `use_segment_attention`: restore the layers that the model was loaded with."""
    run_mixers_on_rows(model)
    if _has_segment_attention(model):
        model.set_attn_implementation(model.own_attention)


def use_kernel(model: PreTrainedModel, kernel: str) -> None:
    """Make `model` compute batches of `kernel`: by its own layers if documents run separately, else over segments."""
    if kernel == SEPARATE:
        use_own_attention(model)
    else:
        use_segment_attention(model)
