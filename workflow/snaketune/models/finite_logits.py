"""Refusal of a model whose own logits aren't finite, by the cause: a weight, or the first module whose output isn't."""

from typing import Any

import torch
from transformers import PreTrainedModel

from snaketune.errors import SnaketuneError


def check_finite(model: PreTrainedModel, inputs: dict[str, Any], logits: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise SnaketuneError if logits of `inputs` hold NaN or infinity; tokens that a model never generates have -infinity."""
    if (logits < torch.inf).all():
        return
    name, in_type = model.config.model_type, str(dtype).removeprefix("torch.")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # A process has its shard alone of a sharded model.
    values = {name: getattr(tensor, "to_local", lambda kept=tensor: kept)() for name, tensor in tensors}
    # Masks and the like are infinite on purpose, but hold no NaN.
    wrong = {name: ~value.isfinite() for name, value in values.items() if not value.isfinite().all()}
    if weights := [name for name, _ in model.named_parameters() if name in wrong]:
        first = wrong[weights[0]]
        raise SnaketuneError(
            f"the weights of this {name} hold NaN or infinity: {weights[0]}, in {int(first.sum()):,} of {first.numel():,} numbers"
            f" ({len(weights)} tensors in all), as loaded; use an undamaged copy of the model, or an earlier checkpoint"
        )
    first = _first_not_finite(model, inputs)
    do = "set training.precision: float32" if dtype != torch.float32 else "use another checkpoint of the model"
    raise SnaketuneError(
        f"the logits of this {name} hold NaN or infinity although its weights are finite, computed in {in_type} for one document "
        f"by its own attention; the first such output is that of {first}. Its numbers are too large for {in_type}, or a kernel "
        f"there is faulty: {do}, or install another version of transformers or torch"
    )


def _first_not_finite(model: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Return the name of the first module whose output isn't finite, in the order in which they end."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not (tensor < torch.inf).all():
                found.append(f"{name or 'the whole model'} ({type(module).__name__})")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "the output head"
