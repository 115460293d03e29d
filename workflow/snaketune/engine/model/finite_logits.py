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
    # A process has its shard alone of a sharded model.
    weights = {key: getattr(weight, "to_local", lambda kept=weight: kept)() for key, weight in model.named_parameters()}
    if wrong := [key for key, weight in weights.items() if not weight.isfinite().all()]:
        weight = weights[wrong[0]]
        raise SnaketuneError(
            f"the weights of this {name} hold NaN or infinity: {wrong[0]}, in {int((~weight.isfinite()).sum()):,} of "
            f"{weight.numel():,} numbers ({len(wrong)} tensors in all); use an undamaged copy of the model, or an earlier "
            "checkpoint"
        )
    first = _first_not_finite(model, inputs)
    do = "set training.precision: float32" if dtype != torch.float32 else "use another checkpoint of the model"
    raise SnaketuneError(
        f"the logits of this {name} hold NaN or infinity although its weights are finite, computed in {in_type} for one "
        f"document by its own attention. The first such output is that of {first}: its numbers are too large for {in_type}, or "
        f"a kernel there is faulty; {do}, or install another version of transformers or torch"
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
