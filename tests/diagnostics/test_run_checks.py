"""Findings of `preflight` about the settings of one run."""

from types import SimpleNamespace

import pytest

from snaketune.config.training_runs import Training
from snaketune.diagnostics.run_checks import check_hyperparameters


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(4, 13, 4), (4, 40, 4), (1, 65, 2), (0.5, 300, 3), (4, 200, None), (10, 40, None)]
)
def test_too_few_steps_are_counted_as_the_trainer_makes_them(epochs, rows, steps):
    run = SimpleNamespace(
        lora=None, training=Training(epochs=epochs, batch_rows=64, micro_batch_rows=1, learning_rate=1e-5)
    )
    found = check_hyperparameters(
        SimpleNamespace(run=run, key="sft.a", kind="sft"), True, {"counts": {"train": {"kept": rows}}}
    )
    problems = [finding.problem for finding in found if finding.key == "sft.a.training.batch_rows"]
    assert problems == ([] if steps is None else [
        f"64 rows a step make {steps} steps of {rows} rows in {epochs:g} epochs, too few to train with"
    ])  # fmt: skip
