"""Whether a model fits its device beside the cache of its responses, from its config alone, before any weight is read."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from snaketune.engine.model.devices import Compute
from snaketune.engine.model.machine import Machine, inspect_machine
from snaketune.engine.model.packing_support import unloaded_model
from snaketune.errors import SnaketuneError

FEW = 8


def check_memory(
    config: PretrainedConfig, compute: Compute, dtype: torch.dtype, *, rows: int, tokens: int, gpus: int
) -> None:
    """Raise SnaketuneError if the weights, or these with the cache of a batch, are larger than the memory of the device.

    Args:
        dtype: of the weights.
        rows: responses that are computed together.
        tokens: of the longest prompt with its response.
        gpus: that the model is divided among.
    """
    try:
        weights, cache = memory_of(config, compute.dtype, dtype, tokens)
    except Exception as error:
        # The families' own code, which may need values; then the device decides.
        print(f"memory isn't checked before loading ({type(error).__name__})", flush=True)
        return
    if problem := memory_problem(weights // gpus, cache // gpus, rows, tokens, inspect_machine(compute)):
        raise SnaketuneError(problem)


def memory_of(config: PretrainedConfig, compute_dtype: torch.dtype, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
    """Bytes of the weights, and of the cache of one response of so many tokens with its prompt."""
    with torch.device("meta"), torch.no_grad():
        # Products of experts on the meta device are those of bfloat16.
        model = unloaded_model(config, torch.bfloat16).eval()
        weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        # A few tokens: layers with a state may compute one token after another.
        few, more = (model(input_ids=torch.zeros(1, n, dtype=torch.int64), use_cache=True) for n in (FEW, 2 * FEW))
    cache = 0
    for layer, longer in zip(few.past_key_values.layers, more.past_key_values.layers, strict=True):
        per_token = (_numel(longer) - _numel(layer)) / FEW
        cached = min(tokens, getattr(layer, "sliding_window", None) or tokens)
        cache += round(_numel(layer) + per_token * (cached - FEW))
    return weights, cache * compute_dtype.itemsize


def _numel(layer: Any) -> int:
    return sum({id(tensor): tensor.numel() for tensor in _tensors(vars(layer))}.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def memory_problem(weights: int, cache: int, rows: int, tokens: int, machine: Machine) -> str | None:
    """Why a model and the cache of `rows` responses don't fit, with what to do; None if they do.

    >>> import torch
    >>> l4 = {"gpu": "NVIDIA L4", "memory": 24 * 10**9, "free": 23 * 10**9}
    >>> machine = Machine(device=torch.device("cuda"), threads=8, cores=8, **l4)
    >>> memory_problem(15_200_000_000, 200_000_000, 32, 4096, machine)
    >>> memory_problem(15_200_000_000, 400_000_000, 32, 4096, machine).partition("; ")[2]
    'set generation.batch_size: 22, or lower max_new_tokens'
    """
    where = machine.gpu or "this machine"
    room, memory = machine.memory - weights, f"{where} has {machine.memory / 1e9:.1f} GB"
    if room < cache:
        return (
            f"the weights take {weights / 1e9:.1f} GB and the cache of a response of up to {tokens} tokens "
            f"{cache / 1e9:.2f} GB, and {memory}; use a larger GPU, or engine: vllm with more gpus"
        )
    if rows * cache > room:
        return (
            f"the weights take {weights / 1e9:.1f} GB and the cache of {rows} responses of up to {tokens} tokens "
            f"{rows * cache / 1e9:.1f} GB, and {memory}; set generation.batch_size: {room // cache}, or lower max_new_tokens"
        )
    return None
