"""Compilation of a model's layers with `torch.compile`: when it pays, and without recompilation after the first step.

Each layer is compiled by itself; they share their code, so one compilation serves them all. Attention kernels whose shapes vary
from batch to batch run uncompiled, behind graph breaks. Everything else has static shapes, or, where padding is removed, is
compiled for any number of tokens. Under gradient checkpointing the children of a layer are compiled: a graph break inside the
checkpoint would silently run the whole layer uncompiled.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from snaketune.engine.model.attention import use_segment_attention
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import inner_model
from snaketune.engine.model.kernels import ANY_SHAPE, NOT_COMPILED, SEPARATE
from snaketune.errors import SnaketuneError, first_line

# FLOPs of a run from which compiling pays: it costs some 10 s on a CPU and a minute on a GPU, and saves a tenth of the time.
# FLOPs rather than seconds, since a measured time would change the choice, and the last bits of the weights, between runs.
MIN_FLOPS = {"cpu": 2e13, "cuda": 1e17}
# Enough for training and evaluation of a model with a dozen kinds of layers.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class CompileChoice:
    """The decision whether to compile layers, and its reason."""

    compiled: bool
    reason: str


def choose_compilation(setting: Literal["auto"] | bool, flops: float, device: torch.device) -> CompileChoice:
    """Resolve `training.compile` for a run of `flops` FLOPs; SnaketuneError if it is true and torch can't compile on this
    machine."""
    enough = MIN_FLOPS.get(device.type)
    if setting is False:
        refusal = "training.compile is false"
    elif setting == "auto" and enough is None:
        refusal = f"auto: never on {device.type}"
    elif setting == "auto" and flops < enough:
        refusal = f"auto: {flops:.1e} FLOPs are too few to earn it back ({enough:.0e} on {device.type})"
    elif error := _compile_error(device):
        if setting is True:
            raise SnaketuneError(f"training.compile: torch can't compile here ({error}); expected `auto` or `false`")
        refusal = f"auto: torch can't compile here ({error})"
    else:
        reason = "training.compile is true" if setting is True else f"auto: {flops:.1e} FLOPs"
        return CompileChoice(compiled=True, reason=reason)
    return CompileChoice(compiled=False, reason=refusal)


def _compile_error(device: torch.device) -> str:
    """Return why torch can't compile, for instance a missing C++ compiler; empty if it can."""
    if error := _cache_error():
        return error
    try:
        torch.compile(lambda tensor: tensor.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:
        return first_line(error)
    return ""


def _cache_error() -> str:
    """Return why torch's cache of compiled code isn't safe to load; empty if it is. Other users who can write to it, by
    default a folder in /tmp, could run code in this process."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    try:
        about = folder.stat()
    except OSError:
        return ""
    if about.st_uid == os.getuid() and not about.st_mode & stat.S_IWOTH:
        return ""
    return f"other users can write to {folder}, from which it loads code; set TORCHINDUCTOR_CACHE_DIR to another folder"


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that transformers marks as layers; models with remote code may have none."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module, compute: Compute, *, checkpointing: bool) -> None:
    """Compile the layers of `model` in place, when they first run; for `checkpointing`, which is enabled later, their
    children. SnaketuneError: the model has no modules that transformers marks as layers."""
    layers = layers_of(model)
    if not layers:
        raise SnaketuneError("training.compile: this model has no layers that can be compiled; expected `false`")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    # No kernels chosen by timing: a resumed run could choose others.
    torch._inductor.config.deterministic = True
    # Dropout draws the same random numbers as without compilation, so that losses can be compared.
    torch._inductor.config.fallback_random = True
    if compute.kernel in NOT_COMPILED:
        use_segment_attention(model, compiled=False)
    elif compute.kernel != SEPARATE:
        inner_model(model).register_forward_pre_hook(_mark_dynamic, with_kwargs=True)
    # On a CPU, eager passes work in its caches and save exponentials for the backward pass; fused ones would recompute logits.
    inner_model(model).fused_head = compute.device.type == "cuda"
    for layer in layers:
        for module in layer.children() if checkpointing else (layer,):
            module.compile(dynamic=compute.kernel in ANY_SHAPE)


def _mark_dynamic(model: torch.nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Forward pre-hook: mark tensors whose lengths vary from batch to batch as dynamic, which avoids recompilation."""
    if segments := inputs.get("segments"):
        for tensor in (segments.keys_U, segments.cu_q, segments.cu_k):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
