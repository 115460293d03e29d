"""An exponential moving average of the trained weights, as part of checkpoints.

The average begins with the weights after the first step, as torch's AveragedModel does, which would copy frozen weights too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

from snaketune.engine.tensor_files import StoredTensors, write

AVERAGE = "average"


class AveragedWeights(TrainerCallback):
    """Averages parameters after every optimizer step.

    Attributes:
        tensors: the average by name, on the device of the parameters; empty before the first step.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.update, self.tensors = get_ema_multi_avg_fn(decay), {}

    @torch.no_grad()
    def on_step_end(self, args, state, control, **_):
        if self.tensors:
            self.update([*self.tensors.values()], [parameter.detach() for parameter in self.parameters.values()], None)
        else:
            self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the parameters and of their average; called again, it restores both."""
        for name, average in self.tensors.items():
            value = self.parameters[name].detach().clone()
            self.parameters[name].detach().copy_(average)
            average.copy_(value)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the average in place of the parameters while the context lasts."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def save(self, folder: Path, is_main: bool) -> None:
        """Write the average to a checkpoint; called by all processes."""
        write(folder, AVERAGE, self.tensors, is_main)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the average from a checkpoint."""
        stored: dict[str, Any] = {name: torch.empty_like(parameter) for name, parameter in self.parameters.items()}
        StoredTensors(folder, AVERAGE).read(stored)
        self.tensors = stored
