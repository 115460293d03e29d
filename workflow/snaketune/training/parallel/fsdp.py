"""Models in shards (FSDP2): of every weight, its gradient and its optimizer state each process holds a share.

Layer by layer, and the rest of the model together. A layer is whole on a GPU while it computes, and no longer; so is what comes
before and after the layers, during a step. torch's own `fully_shard` does it, on the CPU as on GPUs, and transformers' Trainer
takes the model as one that comes sharded: accelerate's FSDP would train on CPUs without shards, and not say so.

What moves between processes has the data type of the computation, as under autocast on one GPU: float32 masters are rounded on
their way to a layer, but for its norms, and gradients are added up in float32. They are added up after every micro-batch: whole
ones, kept for later, would be as large as the model.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from snaketune.config.operation import Operation
from snaketune.errors import SnaketuneError
from snaketune.models.compiling import layers_of
from snaketune.models.devices import Compute
from snaketune.models.forward import inner_model
from snaketune.training.parallel.zero import is_zero


def processes() -> int:
    """How many train together, as torch's launchers tell."""
    return int(os.environ.get("WORLD_SIZE", 1))


def shard(model: torch.nn.Module, compute: Compute, dtype: torch.dtype) -> None:
    """Give each process its share of `model`, which all of them have alike, in place.

    Args:
        model: on the CPU, with its adapters; it moves to the device layer by layer.
        dtype: of float weights that aren't adapters' or frozen ones.
    Raises:
        SnaketuneError: it has no layers that transformers knows, so all of it would be whole at once.
    """
    model = inner_model(model)
    layers = layers_of(model)
    if not layers:
        raise SnaketuneError(
            f"operation.launch: a {model.config.model_type} model has no layers that fsdp could share out; expected `ddp` or "
            "`deepspeed`"
        )
    PartialState(cpu=compute.device.type == "cpu")
    mesh = init_device_mesh(compute.device.type, (dist.get_world_size(),))
    for layer in layers:
        _to_dtype(layer, dtype)
        policy = _policy(layer, compute)
        if policy.param_dtype and (norms := _norms(layer)):
            fully_shard(norms, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    _to_dtype(model, dtype)
    # In float32 where its weights are: the residual stream begins there, and ends.
    fully_shard(model, mesh=mesh)


def _policy(layer: torch.nn.Module, compute: Compute) -> MixedPrecisionPolicy:
    masters = all(p.dtype == torch.float32 for p in layer.parameters())
    if compute.dtype == torch.float32 or not masters:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _norms(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """What autocast leaves in float32."""
    return [module for module in layer.modules() if "norm" in type(module).__name__.lower() and module._parameters]


def _to_dtype(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Weights that came in another data type than they are trained in, those in shards already left alone."""
    if dtype != torch.float32:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(dtype)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `shard` has been here."""
    return isinstance(inner_model(model), FSDPModule)


def reshard(model: torch.nn.Module) -> None:
    """After a forward pass that nothing comes back from, what is around the layers is still whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Whole. Called by all processes."""
    return parameter.detach().full_tensor()


def gather(
    model: torch.nn.Module,
    full_tensor_of: Callable[[torch.nn.Parameter], torch.Tensor],
    *,
    keep: bool,
    only_trained: bool,
    finish: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Make a model that is shared out whole again on the CPU, one tensor at a time, in place; it can't be trained afterwards.

    Called by all processes.

    Args:
        full_tensor_of: gives a weight whole, if all processes call it.
        keep: whether this process is to have it; the others are left with what they had.
        only_trained: frozen weights stay where they are.
        finish: is given each weight's name and its whole value, and gives what to keep of it.
    """
    reshard(model)
    whole: dict[torch.nn.Parameter, torch.nn.Parameter | None] = {}
    for place, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or (only_trained and not parameter.requires_grad):
                continue
            if parameter not in whole:
                # By all processes, and once of tied weights.
                tensor, whole[parameter] = full_tensor_of(parameter), None
                if keep:
                    kept = finish(f"{place}.{name}".removeprefix("."), tensor).to("cpu")
                    whole[parameter] = torch.nn.Parameter(kept, requires_grad=parameter.requires_grad)
            if keep:
                module._parameters[name] = whole[parameter]
    for module in model.modules() if keep else ():
        if isinstance(module, FSDPModule):
            # It would put its shards back.
            module.__class__ = type(module).__bases__[1]


class ShardedModelMixin:
    """Mixed into a transformers Trainer: it trains a model that comes in shards, and is told so by transformers' own mark."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        # Set here and not on the model: before, the Trainer refuses to write checkpoints of such a model. Its own, that is.
        self.is_distributed_loading_by_transformers = is_sharded(self.model)

    def _move_model_to_device(self, model, device):
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def train(self, *arguments, **keywords):
        # The optimizer is to be given shards.
        reshard(self.model)
        return super().train(*arguments, **keywords)

    def _defer_fsdp_gradient_reduction(self):
        # Not deferred: whole gradients would have to be kept.
        return nullcontext()

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _prepare_for_training(self, *arguments, **keywords):
        prepared = super()._prepare_for_training(*arguments, **keywords)
        check_strategy(self.run.operation, self.model_wrapped)
        return prepared


def check_strategy(operation: Operation, model: torch.nn.Module) -> None:
    """What trains is what was asked for.

    Raises:
        SnaketuneError: it isn't.
    """
    # One process has nobody to share with, however it was started.
    if processes() > 1 and (found := _strategy(model)) != (operation.launch, operation.zero_stage):
        raise SnaketuneError(
            f"operation.launch: {operation.launch} on {processes()} processes came out as {found[0]} (zero_stage {found[1]}); "
            "nothing was trained"
        )


def _strategy(model: torch.nn.Module) -> tuple[str, int | None]:
    if is_zero(model):
        return "deepspeed", model.zero_optimization_stage()
    return "fsdp" if _all_in_shards(model) else "ddp" if isinstance(model, DistributedDataParallel) else "single", None


def _all_in_shards(model: torch.nn.Module) -> bool:
    return is_sharded(model) and all(isinstance(parameter, DTensor) for parameter in model.parameters())
