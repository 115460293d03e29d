"""Sharded models (FSDP2): each process holds a shard of every weight, its gradient and its optimizer state.

Each layer is one FSDP unit, and the rest of the model is another. torch's `fully_shard` does this, on CPUs and GPUs, and
transformers' Trainer takes the model as already sharded: accelerate's own FSDP would train on CPUs without shards, silently.

Communication is in the data type of the computation, as under autocast on one GPU: float32 master weights are rounded when a
layer is gathered, except for its norms, and gradients are reduced in float32, after every micro-batch: accumulating unsharded
ones would take as much memory as the model.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from snaketune.engine.model.compiling import layers_of
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import inner_model
from snaketune.engine.zero import is_zero
from snaketune.errors import SnaketuneError


def world_size() -> int:
    """The number of processes of this training (WORLD_SIZE, which torch's launchers set)."""
    return int(os.environ.get("WORLD_SIZE", 1))


def shard(model: torch.nn.Module, compute: Compute, dtype: torch.dtype) -> None:
    """Shard `model`, which each process has loaded on the CPU, with its adapters, in place; it moves to the device layer by
    layer, weights that are neither adapters nor frozen in `dtype`. SnaketuneError: transformers lists no layers for it,
    so the whole model would have to be one unit."""
    model = inner_model(model)
    layers = layers_of(model)
    if not layers:
        raise SnaketuneError(
            f"operation.launch: a {model.config.model_type} model has no layers that fsdp could shard; expected `ddp` or "
            "`deepspeed`"
        )
    PartialState(cpu=compute.device.type == "cpu")
    mesh = init_device_mesh(compute.device.type, (dist.get_world_size(),))
    for layer in layers:
        _to_dtype(layer, dtype)
        policy = _policy(layer, compute)
        # Autocast computes norms in float32.
        norms = [module for module in layer.modules() if "norm" in type(module).__name__.lower() and module._parameters]
        if policy.param_dtype and norms:
            fully_shard(norms, mesh=mesh)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    _to_dtype(model, dtype)
    # Without a policy, so in float32 if the weights are: embeddings and head are both ends of the residual stream.
    fully_shard(model, mesh=mesh)


def _policy(layer: torch.nn.Module, compute: Compute) -> MixedPrecisionPolicy:
    masters = all(p.dtype == torch.float32 for p in layer.parameters())
    if compute.dtype == torch.float32 or not masters:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _to_dtype(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert float weights that aren't sharded yet to float32, if that is `dtype`."""
    for tensor in (*module.parameters(), *module.buffers()) if dtype == torch.float32 else ():
        if tensor.is_floating_point() and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(dtype)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `shard` was applied to the model."""
    return isinstance(inner_model(model), FSDPModule)


def reshard(model: torch.nn.Module) -> None:
    """Shard all units again: after a forward pass without a backward pass, the outer unit is still unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a tensor, or the tensor itself if it isn't sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The unsharded value of a parameter; called by all processes."""
    return parameter.detach().full_tensor()


def gather(
    model: torch.nn.Module,
    full_tensor_of: Callable[[torch.nn.Parameter], torch.Tensor],
    *,
    keep: bool,
    only_trained: bool,
    finish: Callable[[str, torch.Tensor], torch.Tensor],
) -> None:
    """Unshard a model on the CPU, one tensor at a time, in place; called by all processes. Afterwards it can be saved, but not
    trained, nor moved or cast by `to`, at which FSDP would restore its shards.

    `full_tensor_of` returns the unsharded value of a weight, when all processes call it; `finish` converts a weight, given
    its name and this value, to the tensor that is stored. Only a process with `keep` receives weights, the others keep
    their shards.
    """
    reshard(model)
    gathered: dict[torch.nn.Parameter, torch.nn.Parameter | None] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or (only_trained and not parameter.requires_grad):
                continue
            if parameter not in gathered:
                # A collective call, made once for tied weights.
                tensor, gathered[parameter] = full_tensor_of(parameter), None
                if keep:
                    finished = finish(f"{prefix}.{name}".removeprefix("."), tensor).to("cpu")
                    gathered[parameter] = torch.nn.Parameter(finished, requires_grad=parameter.requires_grad)
            if keep:
                module._parameters[name] = gathered[parameter]


def check_strategy(launch: str, zero_stage: int | None, model: torch.nn.Module) -> None:
    """Raise SnaketuneError unless the prepared model is trained by the configured strategy."""
    # In a single process no strategy shards anything.
    if world_size() == 1:
        return
    stage = model.zero_optimization_stage() if is_zero(model) else None
    if stage is not None:
        actual = "deepspeed"
    elif is_sharded(model) and all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        actual = "fsdp"
    else:
        actual = "ddp" if isinstance(model, DistributedDataParallel) else "single"
    if (actual, stage) != (launch, zero_stage):
        raise SnaketuneError(
            f"operation.launch: {launch} on {world_size()} processes resulted in {actual} (zero_stage {stage}); nothing was "
            "trained"
        )
