"""DeepSpeed's ZeRO, stages 2 and 3: gather its partitions for checkpoints, one tensor at a time, and partition them on resume.

DeepSpeed's own checkpoints are pickles that only the same number of processes can read. Its flattened, partitioned weights and
states, gathered in the main process's host memory, give the checkpoint that a single process writes, for any number of them.
"""

from typing import Any

import torch
import torch.distributed as dist

from snaketune.engine.tensor_files import StoredTensors


def is_zero(model: torch.nn.Module) -> bool:
    """Whether a wrapped model is a DeepSpeed engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def gathered_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The unpartitioned value of a weight: the float32 master of a trained one, a frozen one as stored. Called by all
    processes."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter).detach()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def trained_weights(model: torch.nn.Module, keep: bool) -> tuple[dict[str, torch.Tensor], str | None]:
    """Gather on the CPU the tensors that `checkpoints.trained_tensors` returns for an unpartitioned model, in the processes
    that `keep` them; and the name of the first one that isn't finite, or None. Called by all processes."""
    saved, wrong = model.state_dict().keys(), None
    tensors: dict[str, torch.Tensor] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, tensor in [*trained, *((name, buffer) for name, buffer in model.named_buffers() if name in saved)]:
        full = gathered_weight(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor
        if wrong is None and full.is_floating_point() and not full.isfinite().all():
            wrong = name
        if keep:
            tensors[name] = full.to("cpu", copy=True)
    return tensors, wrong


class UnshardedOptimizer:
    """A view of a DeepSpeed engine's optimizer as the torch optimizer that it wraps, on unpartitioned parameters."""

    def __init__(self, engine: Any, groups: list[list[torch.nn.Parameter]]):
        """Args: groups: the parameter groups of the torch optimizer before DeepSpeed wrapped it."""
        self.zero, self.groups = engine.optimizer, groups
        self.inner: torch.optim.Optimizer = self.zero.optimizer
        three = engine.zero_optimization_stage() == 3
        # This process's partitions of the flattened groups, which are the parameters of the inner optimizer.
        self.flat = self.zero.fp32_partitioned_groups_flat if three else self.zero.single_partition_of_fp32_groups

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.groups for parameter in group]

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state dict, on the CPU; only the main process has states in it. Called by all processes."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        is_main, state = dist.get_rank() == 0, {}
        known = self.inner.state.get(self.flat[0], {})
        for index, parameter in enumerate(self.parameters):
            # States that aren't per weight, such as the step, are the same for all parameters.
            full = {
                key: safe_get_full_optimizer_state(parameter, key).to("cpu") if self._of_weights(value) else value
                for key, value in known.items()
            }
            if is_main:
                state[index] = full
        numbers = iter(range(len(self.parameters)))
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": [next(numbers) for _ in own]}
            for group, own in zip(self.inner.param_groups, self.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _link(self) -> None:
        """Have stage 2 locate the states of each parameter again: it does so once, possibly before there are any."""
        if hasattr(self.zero, "_hp_optimizer_states_linked"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _of_weights(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.numel() == self.flat[0].numel()

    @torch.no_grad()
    def load(self, states: StoredTensors, numbers: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Load the states that were written from `state_dict`; `numbers` are those that aren't tensors, by index/key."""
        keys = {name.partition("/")[2]: kind for name, kind in states.tensors.items() if name.startswith("0/")}
        for flat in self.flat:
            own = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in keys.items() if not shape}
            states.read({f"0/{key}": value for key, value in own.items()})
            of_all = {key.partition("/")[2]: value for key, value in numbers.items() if key.startswith("0/")}
            sized = {key: torch.zeros_like(flat, dtype=dtype) for key, (dtype, shape) in keys.items() if shape}
            self.inner.state[flat] = own | of_all | sized
        self._link()
        for index, parameter in enumerate(self.parameters):
            for key in (key for key, (_, shape) in keys.items() if shape):
                _fill(parameter, key, states, f"{index}/{key}")
        for group, saved in zip(self.inner.param_groups, groups, strict=True):
            group |= {key: value for key, value in saved.items() if key != "params"}


def _fill(parameter: torch.nn.Parameter, key: str, stored: StoredTensors, name: str) -> None:
    """Copy this process's partition of a parameter's state into DeepSpeed's buffer."""
    from deepspeed.utils import safe_get_local_optimizer_state

    dtype, shape = stored.tensors[name]
    if hasattr(parameter, "ds_id"):
        fragment = safe_get_local_optimizer_state(parameter, key)
        start = dist.get_rank() * fragment.numel()
    elif parameter._hp_mapping is None:
        return
    else:
        fragment, start = parameter._hp_mapping.get_hp_fragment(key), parameter._hp_mapping.lp_fragment_address.start
    full = torch.empty(shape, dtype=dtype)
    stored.read({name: full})
    # The last process's partition may end in padding.
    own = full.flatten()[start : start + fragment.numel()]
    fragment[: len(own)].copy_(own)
