"""Tables of optimizers and schedules equal those of transformers; keys without effect are refused."""

import inspect
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from snaketune.config.load import load
from snaketune.config.optimizers import MUON, OPTIMIZERS, POLYNOMIAL_END, SCHEDULES, OptimizerName, ScheduleName
from snaketune.config.training_runs import Sft
from snaketune.errors import SnaketuneError

from .edits import put

ROOT = Path(__file__).parents[2]
# What the Trainer gives a schedule.
GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


def test_every_optimizer_and_schedule_of_transformers_is_known():
    assert OPTIMIZERS.keys() - {MUON} == {name.value for name in OptimizerNames}
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
    page = (ROOT / "docs/config/training.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert all(f"`{option}`" in row for option in SCHEDULES[name].options)


def test_a_config_is_read_without_torch_and_transformers():
    read = (
        "import sys, yaml; from snaketune.config.load import load; load(yaml.safe_load(open('config/config.yaml')));"
        "sys.exit(str(sorted({'torch', 'transformers', 'bitsandbytes'} & sys.modules.keys()) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", read], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((0, ""), (1, "\n")), done.stderr


TRAINING = {"learning_rate": 0.01}
WRONG_TRAINING = [
    (
        {"schedule": "constant", "warmup_fraction": 0.1},
        r"training\.warmup_fraction: found 0\.1, but schedule 'constant' has no",
    ),
    ({"optimizer": "sgd", "betas": [0.8, 0.9]}, r"training\.betas: found \[0\.8, 0\.9\], but optimizer 'sgd' has none"),
    (
        {"schedule": "linear", "schedule_options": {"power": 2}},
        r"schedule_options: schedule linear has no options; found 'power'",
    ),
    ({"schedule_options": {"num_cycles": float("inf")}}, r"num_cycles: found inf; input should be a finite number"),
    (
        {"schedule": "polynomial", "schedule_options": {"lr_end": 0.5}},
        r"schedule polynomial falls to 0\.5, .* learning_rate 0\.01",
    ),
    (
        {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr": 1e-4, "min_lr_rate": 0.1}},
        r"needs min_lr or min_lr_rate; found min_lr and min_lr_rate",
    ),
    ({"schedule": "warmup_stable_decay"}, r"schedule warmup_stable_decay needs num_decay_steps; found none"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_TRAINING)
def test_keys_that_optimizer_and_schedule_do_not_use_are_refused(raw, settings, message):
    with pytest.raises(SnaketuneError, match=message):
        load(put(raw, "sft.demo.training", TRAINING | settings))


def test_schedule_options_are_converted_to_their_type(raw):
    settings = {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr": "1e-5", "num_cycles": 1}}
    config, _ = load(put(raw, "sft.demo.training", TRAINING | settings))
    options = config.sft["demo"].training.schedule_options
    assert options == {"min_lr": 1e-5, "num_cycles": 1.0}
    assert [type(value) for value in options.values()] == [float, float]


def test_a_missing_optimizer_package_is_reported_with_the_install_command(raw, monkeypatch):
    monkeypatch.setattr("snaketune.config.optimizers.find_spec", lambda name: name != "bitsandbytes")
    wanted = put(raw, "sft.demo.training.optimizer", "adamw_8bit")
    with pytest.raises(
        SnaketuneError, match=r"sft\.demo\.training\.optimizer: 'adamw_8bit' needs bitsandbytes, .* pip install"
    ):
        load(wanted)
    # Where there is no torch, trainings run in another environment.
    monkeypatch.setattr("snaketune.config.optimizers.find_spec", lambda name: None)
    load(wanted)


@pytest.mark.parametrize(
    ("name", "operation", "message"),
    [
        ("adafactor", {"launch": "fsdp", "gpus": 2},
         r"adafactor doesn't work with models sharded by fsdp; expected one of adamw"),
        ("adamw_8bit", {"launch": "deepspeed", "gpus": 2}, r"adamw_8bit doesn't work with models sharded by deepspeed"),
        ("adagrad", {"launch": "deepspeed", "gpus": 2}, r"expected one of adamw_torch, adamw_torch_fused, sgd, rmsprop"),
        ("adagrad", {"launch": "fsdp", "gpus": 2}, None),
        ("adafactor", {"launch": "fsdp", "gpus": 1}, None),
        ("adamw_8bit", {"launch": "ddp", "gpus": 2}, None),
    ],
)  # fmt: skip
def test_an_optimizer_that_needs_unsharded_weights_is_refused_with_sharding(name, operation, message):
    training = {"learning_rate": 0.01, "optimizer": name, "batch_rows": 8, "micro_batch_rows": 2}
    run = {
        "base": {"path": "some/model"},
        "corpus": "c",
        "tokenizer": "t",
        "training": training,
        "operation": operation,
    }
    with pytest.raises(ValidationError, match=message) if message else nullcontext():
        Sft.model_validate(run)
