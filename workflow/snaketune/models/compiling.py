"""Compiling a model's layers with `torch.compile`: when it pays, and so that nothing is compiled again after the first step.

Each layer is compiled by itself; they share their code, so one compilation serves them all, and modules and weights keep
their names. Where a kernel of attention has other shapes in every batch, the compiled code breaks around it. Everything else
has the same shapes from shard to loss, or, where free tokens aren't computed, is compiled for any number of tokens; what
varlen kernels are given of segments (their number, their keys) is marked as dynamic. Of layers
that are checkpointed the parts are compiled: the graph breaks inside the checkpoint, and then the whole layer would run as
it is, without a word.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from snaketune.errors import SnaketuneError
from snaketune.models.attention import attend, use_attention
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.models.kernels import ANY_SHAPE, NOT_COMPILED

# FLOPs of a run from which on compiling pays: some 10 s on a CPU, a minute on a GPU, for a tenth of the time that follows.
# Not the time that they take: the choice, and with it the last bits of the weights, would change from run to run.
PAYS = {"cpu": 2e13, "cuda": 1e17}
# A step of training and an evaluation of a dozen layers of different kinds.
MOST_VARIANTS = 64


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Whether layers are compiled, and why."""

    compiled: bool
    why: str


def choose(setting: Literal["auto"] | bool, flops: float, device: torch.device) -> Choice:
    """What `training.compile` means for a run of so many FLOPs.

    Raises:
        SnaketuneError: compilation was asked for where it doesn't work.
    """
    if setting is False:
        return Choice(compiled=False, why="training.compile is false")
    if setting == "auto":
        enough = PAYS.get(device.type)
        if enough is None:
            return Choice(compiled=False, why=f"auto doesn't on {device.type}")
        if flops < enough:
            return Choice(
                compiled=False,
                why=f"auto: {flops:.1e} FLOPs are too few to earn it back ({enough:.0e} on {device.type})",
            )
    trouble = _trouble(device)
    if trouble and setting is True:
        raise SnaketuneError(f"training.compile: torch can't compile here ({trouble}); expected `auto` or `false`")
    if trouble:
        return Choice(compiled=False, why=f"auto: torch can't compile here ({trouble})")
    return Choice(compiled=True, why="training.compile is true" if setting is True else f"auto: {flops:.1e} FLOPs")


def _trouble(device: torch.device) -> str:
    """Why nothing can be compiled, for instance for want of a C++ compiler; empty if something can."""
    if told := _cache_trouble():
        return told
    try:
        torch.compile(lambda tensor: tensor.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def _cache_trouble() -> str:
    """Why what torch compiled before isn't to be loaded: who may write to its folder, by default in /tmp, runs code here."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
    try:
        about = folder.stat()
    except OSError:
        return ""
    if about.st_uid == os.getuid() and not about.st_mode & stat.S_IWOTH:
        return ""
    return f"{folder}, from where it loads code, can be written to by others; name another folder in TORCHINDUCTOR_CACHE_DIR"


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What transformers knows as layers; none of a model whose code comes with it."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(model: torch.nn.Module, compute: Compute, *, checkpointing: bool) -> None:
    """Compile the layers of `model` in place; they are compiled when they first run.

    Args:
        checkpointing: whether the training is going to checkpoint them, which it switches on later.

    Raises:
        SnaketuneError: it has none that transformers knows as layers.
    """
    layers = layers_of(model)
    if not layers:
        raise SnaketuneError("training.compile: this model has no layers that can be compiled; expected `false`")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    # Kernels aren't chosen by timing them: a resumed run would choose others.
    torch._inductor.config.deterministic = True
    # Dropout draws what it draws without compilation, so that losses can be compared.
    torch._inductor.config.fallback_random = True
    if compute.kernel in NOT_COMPILED:
        use_attention(model, torch.compiler.disable(attend))
    else:
        inner_model(model).register_forward_pre_hook(_mark_dynamic, with_kwargs=True)
    # On a CPU, eager passes work in its caches and keep what the backward pass needs; fused ones would make logits again.
    inner_model(model).fused_head = compute.device.type == "cuda"
    for layer in layers:
        for module in layer.children() if checkpointing else (layer,):
            module.compile(dynamic=compute.kernel in ANY_SHAPE)


def _mark_dynamic(model: torch.nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """A forward pre-hook: the lengths of these tensors differ from batch to batch, and each would be compiled for."""
    if segments := inputs.get("segments"):
        for tensor in (segments.keys_U, segments.cu_q, segments.cu_k):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
