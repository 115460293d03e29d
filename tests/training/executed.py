"""The operation of a test's training, with the batch plan that its settings name."""

from typing import Any

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Training


def executed(training: Training, **operation: Any) -> Execution:
    """Return an operation with every `auto` resolved, as worker processes get it."""
    return Execution(
        micro_batch_rows=training.micro_batch_rows,
        gradient_checkpointing=training.gradient_checkpointing is True,
        # Tests run on the CPU.
        allow_cpu=True,
        **operation,
    )
