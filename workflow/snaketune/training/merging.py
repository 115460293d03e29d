"""Weighted averages of the weights of models, tensor by tensor, in float32."""

from collections.abc import Sequence
from pathlib import Path

import torch

from snaketune.engine.model.adapters import cast_parameters
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import AdapterStack
from snaketune.training.non_text_modules import add_non_text_modules
from snaketune.training.save_model import SHARD_SIZE

# Vectors whose angle is smaller are interpolated linearly.
SMALLEST_SINE = 1e-4


@torch.no_grad()
def merge(stacks: Sequence[AdapterStack], weights: Sequence[float], method: str, folder: Path) -> str:
    """Write the merged model to a folder. At most two models are in memory.

    Args:
        weights: of the models; they are divided by their sum.
        method: `linear` or `slerp`; the latter takes two models.
    Returns:
        The data type of the saved weights, that of the first model.
    Raises:
        SnaketuneError: tensors differ in name or shape.
    """
    dtype = stacks[0].results[0].manifest["saved_dtype"]
    model, total = stacks[0].load(torch.float32), weights[0]
    merged = dict(model.named_parameters())
    for stack, weight in zip(stacks[1:], weights[1:], strict=True):
        other = dict(stack.load(torch.float32).named_parameters())
        shapes = [{name: tuple(parameter.shape) for name, parameter in tensors.items()} for tensors in (merged, other)]
        if different := sorted(set(shapes[0].items()) ^ set(shapes[1].items())):
            name, shape = different[0]
            raise SnaketuneError(
                f"{stack.results[0].folder} can't be merged with {stacks[0].results[0].folder}: {name} {list(shape)} is in one "
                f"of them only ({len(different)} such tensors)"
            )
        total += weight
        for name, tensor in merged.items():
            tensor.copy_((slerp if method == "slerp" else torch.lerp)(tensor, other[name], weight / total))
    cast_parameters(model, getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    if stacks[0].weights:
        add_non_text_modules(folder, model, stacks[0].weights)
    return dtype


def slerp(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Return the point at this share of the arc from `first` to `second` (Shoemake, 1985).

    >>> slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5)
    tensor([0.7071, 0.7071])
    """
    cosine = torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0).clamp(-1, 1)
    angle = torch.acos(cosine)
    if torch.sin(angle) < SMALLEST_SINE:
        return torch.lerp(first, second, share)
    return (torch.sin((1 - share) * angle) * first + torch.sin(share * angle) * second) / torch.sin(angle)
