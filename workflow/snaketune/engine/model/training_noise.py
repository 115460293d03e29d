"""Random numbers that a model draws in training though its dropout is off, by its config alone."""

from collections import Counter
from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from snaketune.engine.model.forward import without_dropout
from snaketune.engine.model.packing_support import unloaded_model
from snaketune.engine.model.text_part import model_class


class _Draws(TorchDispatchMode):
    """Counts operations that may draw random numbers."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        # Dropout is off, and then draws nothing that matters.
        if torch.Tag.nondeterministic_seeded in function.tags and "dropout" not in str(function):
            self.counts[str(function)] += 1
        return function(*arguments, **keywords or {})


def draws_in_training(config: PretrainedConfig) -> bool:
    """Whether a forward pass in training draws random numbers that one in evaluation doesn't and no setting turns off, as
    routers that sample experts do; False if that can't be told without weights."""
    return bool(model_class(config)) and bool(_draws(config, training=True) - _draws(config, training=False))


def _draws(config: PretrainedConfig, *, training: bool) -> Counter[str]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), suppress(Exception):
        # Models whose code depends on values raise errors of any type, often after they drew.
        model = unloaded_model(config, torch.bfloat16).train(training)
        with _Draws() as draws, without_dropout(model):
            with suppress(Exception):
                model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
            return draws.counts
    return Counter()
