"""The operation of a test's training, with the batch plan that its settings name, its loss and its initial weights."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Training
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.training.prepared_dpo import preference_settings
from snaketune.training.prepared_sft import sft_loss


def executed(training: Training, **operation: Any) -> Execution:
    """Return an operation with every `auto` resolved, as worker processes get it."""
    return Execution(
        micro_batch_rows=training.micro_batch_rows,
        gradient_checkpointing=training.gradient_checkpointing is True,
        # Tests run on the CPU.
        allow_cpu=True,
        **operation,
    )


def loss_of(spec: SftSpec | DpoSpec) -> dict[str, Any]:
    """Return the arguments of the trainer that define the loss of a spec."""
    return {"settings": preference_settings(spec)} if isinstance(spec, DpoSpec) else sft_loss(spec)


def made_by(load: Callable[..., Any], config: Any = None, new_config: Any = None) -> SimpleNamespace:
    """Return initial weights that `load` makes, in place of an AdapterStack."""
    configs = {"config": lambda: config, "new_config": lambda: new_config}
    return SimpleNamespace(load=load, **configs, named_base=None, weights=None, tokenizer=None)
