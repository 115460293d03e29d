"""How a test's training runs: in the portions that its own settings name."""

from typing import Any

from snaketune.config.operation import Execution
from snaketune.config.training_runs import Training


def executed(training: Training, **operation: Any) -> Execution:
    """With numbers in the place of `auto`, as processes are told them."""
    return Execution(
        micro_batch_rows=training.micro_batch_rows,
        gradient_checkpointing=training.gradient_checkpointing is True,
        # Tests have nothing else.
        allow_cpu=True,
        **operation,
    )
