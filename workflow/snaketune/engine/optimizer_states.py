"""Optimizer and schedule states in a checkpoint: tensors as safetensors, the rest as JSON, exactly or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from snaketune.engine.tensor_files import StoredTensors, write
from snaketune.engine.zero import UnshardedOptimizer
from snaketune.errors import SnaketuneError

OPTIMIZER = "optimizer"
# Between the keys of nested states.
SEPARATOR = "/"
# Tensor subclasses of other libraries have attributes that safetensors would lose.
TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
# bitsandbytes 0.50: the names of paged states, and the number of elements from which a parameter's states are paged.
PAGED_STATES, PAGED_FROM = ("state1", "state2"), 100_000
TUPLE = "(tuple)"


def save_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer | UnshardedOptimizer, scheduler: Any, is_main: bool = True
) -> None:
    """Write `optimizer` (tensors) and `optimizer.json` (numbers, groups, schedule).

    Raises:
        SnaketuneError: the state holds a value that JSON can't restore exactly.
    """
    state = optimizer.state_dict()
    flat = dict(_flat(state["state"]))
    tensors = {key: value for key, value in flat.items() if type(value) in TENSORS}
    numbers = {key: value for key, value in flat.items() if key not in tensors}
    plain = _plain({"numbers": numbers, "groups": state["param_groups"], "scheduler": scheduler.state_dict()})
    write(folder, OPTIMIZER, tensors, is_main)
    if is_main:
        (folder / "optimizer.json").write_text(json.dumps(plain), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer | UnshardedOptimizer, scheduler: Any) -> None:
    """Load the states that `save_optimizer` wrote."""
    text = (folder / "optimizer.json").read_text(encoding="utf-8")
    plain = json.loads(text, object_hook=lambda read: tuple(read[TUPLE]) if TUPLE in read else read)
    stored = StoredTensors(folder, OPTIMIZER)
    scheduler.load_state_dict(plain["scheduler"])
    if isinstance(optimizer, UnshardedOptimizer):
        optimizer.load(stored, plain["numbers"], plain["groups"])
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {
        key: _empty(dtype, shape, parameters[int(key.partition(SEPARATOR)[0])])
        for key, (dtype, shape) in stored.tensors.items()
    }
    stored.read(tensors)
    state: dict[Any, Any] = {}
    for key, value in (tensors | plain["numbers"]).items():
        index, *names, last = key.split(SEPARATOR)
        nested = state.setdefault(int(index), {})
        for name in names:
            nested = nested.setdefault(name, {})
        nested[last] = value
    saved = {"state": state, "param_groups": plain["groups"]}
    # Inside accelerate's wrapper.
    inner = getattr(optimizer, "optimizer", optimizer)
    if any(_is_paged(inner, parameter) for parameter in parameters):
        _load_paged(inner, saved)
    else:
        optimizer.load_state_dict(saved)


def _is_paged(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether bitsandbytes stores the states of a parameter in paged memory, which may move to the host."""
    return getattr(optimizer, "is_paged", False) and parameter.device.type == "cuda" and parameter.numel() >= PAGED_FROM


def _load_paged(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state dict into paged memory; `load_state_dict` alone would put all states into the GPU's memory."""
    from bitsandbytes import functional

    optimizer.load_state_dict(saved, move_to_device=False)
    for parameter, state in optimizer.state.items():
        for key in optimizer.non_castable_tensor_keys & state.keys():
            value = state[key]
            if key in PAGED_STATES and _is_paged(optimizer, parameter):
                state[key] = functional.get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
                state[key].copy_(value)
                optimizer.page_mng.paged_tensors.append(state[key])
            else:
                state[key] = value.to(parameter.device)


def _empty(dtype: torch.dtype, shape: torch.Size, parameter: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for a state of `parameter`, sharded like the parameter if it has the same shape."""
    if isinstance(parameter, DTensor) and shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


def _flat(state: dict[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested state, with their keys joined."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}{SEPARATOR}")
        else:
            yield f"{path}{key}", value


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; a tuple becomes a mapping, so that it can be restored as a tuple."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {TUPLE: _plain(list(value))}
    if type(value) is list:
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise SnaketuneError(
        f"training.optimizer, training.schedule: a checkpoint can't hold a {type(value).__name__} of their state exactly, so a "
        "resumed training would be another one; choose others"
    )
