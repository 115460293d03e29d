"""The tables of optimizers and schedules are transformers' own, and reading them imports neither transformers nor torch."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from snaketune.config.optimizers import OPTIMIZERS, OptimizerName
from snaketune.config.schedules import POLYNOMIAL_END, SCHEDULES, ScheduleName

ROOT = Path(__file__).parents[2]
# What the Trainer gives a schedule.
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


def test_every_optimizer_and_schedule_of_transformers_is_known():
    assert OPTIMIZERS.keys() == {name.value for name in OptimizerNames}
    assert SCHEDULES.keys() == {name.value for name in SchedulerType}
    assert set(get_args(OptimizerName)) == {name for name in OPTIMIZERS if not OPTIMIZERS[name].refused}
    assert set(get_args(ScheduleName)) == {name for name in SCHEDULES if not SCHEDULES[name].refused}


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_a_schedules_options_are_those_of_its_function(name):
    parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
    assert SCHEDULES[name].options.keys() == parameters.keys() - GIVEN
    required = {option for option in parameters.keys() - GIVEN if parameters[option].default is inspect.Parameter.empty}
    assert required <= set(SCHEDULES[name].needs)
    assert SCHEDULES[name].warms_up == ("num_warmup_steps" in parameters)
    if name == "polynomial":
        assert parameters["lr_end"].default == POLYNOMIAL_END
    readme = (ROOT / "config/README.md").read_text(encoding="utf-8")
    (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{name}` |")]
    assert all(f"`{option}`" in row for option in SCHEDULES[name].options)


def test_a_config_is_read_without_torch_and_transformers():
    read = (
        "import sys, yaml; from snaketune.config.load import load; load(yaml.safe_load(open('config/config.yaml')));"
        "sys.exit(str(sorted({'torch', 'transformers', 'bitsandbytes'} & sys.modules.keys()) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", read], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((0, ""), (1, "\n")), done.stderr
