"""What is measured of the engine: its loss, with chunks and without, and its compilation. All calls of it are here."""

from typing import Any

import torch

from snaketune.models.logprobs import token_losses

try:
    from snaketune.models.compiling import compile_layers

    from snaketune.models.logprobs import summed_losses

    CHUNKS = True
except ImportError:
    CHUNKS = False

    def summed_losses(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return token_losses(model, batch).sum()

    def compile_layers(model: torch.nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                module.compile()


def batch_loss(model: torch.nn.Module, batch: dict[str, Any], *, chunked: bool) -> torch.Tensor:
    """The batch's loss, summed over its supervised tokens."""
    return summed_losses(model, batch) if chunked else token_losses(model, batch).sum()


def compile_model(model: torch.nn.Module) -> None:
    """In place; nothing compiled before counts any more."""
    torch._dynamo.reset()
    compile_layers(model)
