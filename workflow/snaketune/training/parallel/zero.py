"""DeepSpeed's ZeRO, stages 2 and 3: what it shares out, put together for checkpoints one tensor at a time, and taken apart.

DeepSpeed's own checkpoints are pickles that only as many processes can read. In its optimizer the float32 weights and the
states of a group of parameters lie end to end, a part of them in each process. Put together they make the checkpoint that a
single process writes, in the first one's host memory, and any number of processes reads it.
"""

from typing import Any

import torch
import torch.distributed as dist

from snaketune.training.checkpoint.tensor_files import StoredTensors


def is_zero(model: torch.nn.Module) -> bool:
    """Whether this is what DeepSpeed makes of a model."""
    return type(model).__name__ == "DeepSpeedEngine"


def gathered_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A weight as it is learned, in float32; a frozen one as it is. Called by all processes."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter).detach()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def unset_deepspeed() -> None:
    """After a training: what transformers loads from here on, one process may load for itself."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def trained_weights(model: torch.nn.Module, keep: bool) -> tuple[dict[str, torch.Tensor], str | None]:
    """What `checkpoints.trained_tensors` gives of a model that isn't shared out, on the CPU. Called by all processes.

    Args:
        keep: whether this process is to have it.
    Returns:
        The tensors, none where they aren't kept; and the name of the first one that holds a number that isn't finite.
    """
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
    """The optimizer of a DeepSpeed engine, as checkpoints have it: the plain one that it was made from, on whole parameters."""

    def __init__(self, engine: Any, groups: list[list[torch.nn.Parameter]]):
        """Args: groups: the parameters as the plain optimizer had them."""
        self.zero, self.groups = engine.optimizer, groups
        self.inner: torch.optim.Optimizer = self.zero.optimizer
        three = engine.zero_optimization_stage() == 3
        # A process's part of what lies end to end, on which the inner optimizer works.
        self.flat = self.zero.fp32_partitioned_groups_flat if three else self.zero.single_partition_of_fp32_groups

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.groups for parameter in group]

    def state_dict(self) -> dict[str, Any]:
        """As of the plain optimizer, on the CPU of the first process, without states in the others. Called by all."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        first, state = dist.get_rank() == 0, {}
        known = self.inner.state.get(self.flat[0], {})
        for index, parameter in enumerate(self.parameters):
            # Numbers that belong to no single weight are the same of all parameters.
            found = {
                key: safe_get_full_optimizer_state(parameter, key).to("cpu") if self._of_weights(value) else value
                for key, value in known.items()
            }
            if first:
                state[index] = found
        numbers = iter(range(len(self.parameters)))
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": [next(numbers) for _ in own]}
            for group, own in zip(self.inner.param_groups, self.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _link(self) -> None:
        """Stage 2 notes once where the states of each parameter are; too early, where there were none yet."""
        if hasattr(self.zero, "_hp_optimizer_states_linked"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _of_weights(self, value: Any) -> bool:
        return torch.is_tensor(value) and value.numel() == self.flat[0].numel()

    @torch.no_grad()
    def load(self, states: StoredTensors, numbers: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Put back what was written of `state_dict`.

        Args:
            numbers, groups: what of the states are no tensors, by index/key, and the groups.
        """
        keys = {name.partition("/")[2]: one for name, one in states.tensors.items() if name.startswith("0/")}
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
    """Put what this process has of a parameter's state where DeepSpeed has it."""
    from deepspeed.utils import safe_get_local_optimizer_state

    dtype, shape = stored.tensors[name]
    if hasattr(parameter, "ds_id"):
        place = safe_get_local_optimizer_state(parameter, key)
        start = dist.get_rank() * place.numel()
    elif parameter._hp_mapping is None:
        return
    else:
        place, start = parameter._hp_mapping.get_hp_fragment(key), parameter._hp_mapping.lp_fragment_address.start
    full = torch.empty(shape, dtype=dtype)
    stored.read({name: full})
    # The last process's part may end in padding.
    own = full.flatten()[start : start + place.numel()]
    place[: len(own)].copy_(own)
