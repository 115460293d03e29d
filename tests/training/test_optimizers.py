"""Every optimizer and schedule that a config may name trains, and resumes exactly after a kill."""

import json
from types import SimpleNamespace
from typing import get_args

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file

from snaketune.config.optimizers import OptimizerName, ScheduleName
from snaketune.config.training_runs import Training
from snaketune.engine import optimizer_states
from snaketune.engine.optimizer_states import load_optimizer, save_optimizer
from snaketune.errors import SnaketuneError
from snaketune.models.memory import _state_bytes
from snaketune.models.traced_model import trace_model
from snaketune.training.trainer_arguments import step_arguments
from tests.models.conftest import CPU, tiny_model

from .pipeline_runs import copy_after, pack, spec, train

OPTIONS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_warmup_with_min_lr": {"min_lr": 1e-4}} | {
    "warmup_stable_decay": {"num_decay_steps": 2}
}


def model():
    """A model with weights of 4096 elements, the smallest whose states bitsandbytes quantizes."""
    return tiny_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)


def ends_the_same(folder, monkeypatch, **training) -> list[float]:
    """Train, and resume after the fourth of six steps; assert equal weights and return the losses."""
    rows, made = pack(folder / "pack", rows=12), spec(epochs=2, learning_rate=0.003, **training)
    copy_after(1, folder / "straight", folder / "resumed", monkeypatch)
    losses = [entry["loss"] for entry in train(folder / "straight", rows, made, model).run["history"]]
    (checkpoint,) = (folder / "resumed/state/checkpoints").glob("checkpoint-4")
    states = load_file(checkpoint / "optimizer.safetensors")
    # The sizes that the memory estimate assumes, without shared tables and counters.
    planned = trace_model(model().config, CPU).weights
    held = sum(state.nbytes for name, state in states.items() if "qmap" not in name and state.numel() > 2)
    assert held == pytest.approx(sum(_state_bytes(weight, made.training.optimizer) for weight in planned), rel=0.01)
    assert any(state.dtype == torch.uint8 for state in states.values()) == ("8bit" in made.training.optimizer)
    train(folder / "resumed", rows, made, model)
    straight, resumed = (
        load_file(folder / name / "payload.partial/model.safetensors") for name in ("straight", "resumed")
    )
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]
    return losses


# One of each library, and one with paged states.
OPTIMIZERS = {"adamw_torch_fused", "muon", "adafactor", "adamw_8bit", "paged_lion_32bit"}
SCHEDULES = {"cosine", "polynomial", "warmup_stable_decay"}


def each(names: tuple[str, ...], fast: set[str]) -> list:
    assert fast <= {*names}
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("optimizer", each(get_args(OptimizerName), OPTIMIZERS))
def test_an_optimizer_learns_and_resumes_exactly(optimizer, tmp_path, monkeypatch, capsys):
    losses = ends_the_same(tmp_path, monkeypatch, optimizer=optimizer, weight_decay=0.1)
    # The same rows once more.
    assert sum(losses[3:]) < sum(losses[:3])
    assert (f"on cpu {optimizer} isn't paged" in capsys.readouterr().out) == optimizer.startswith("paged")


@pytest.mark.parametrize(
    "name",
    [
        "paged_adamw_8bit",
        *(pytest.param(f"paged_{one}", marks=pytest.mark.slow) for one in ("adamw_32bit", "ademamix_8bit")),
    ],
)
def test_paged_states_are_restored_paged(name, tmp_path, monkeypatch):
    """Host memory stands in for CUDA's paged memory."""
    from bitsandbytes import functional

    def get_paged(*shape, dtype, device):
        buffer = torch.empty(shape, dtype=dtype)
        buffer.is_paged = True
        return buffer

    def made() -> torch.optim.Optimizer:
        kinds = {"paged_adamw_8bit": "PagedAdamW8bit", "paged_adamw_32bit": "PagedAdamW32bit"}
        kind = getattr(bitsandbytes.optim, kinds.get(name, "PagedAdEMAMix8bit"))
        torch.manual_seed(0)
        return kind([torch.nn.Parameter(torch.randn(300, 300)), torch.nn.Parameter(torch.randn(300))], lr=0.1)

    def step(optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter) * parameter.detach()
        optimizer.step()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    saved, loaded = made(), made()
    step(saved)
    save_optimizer(tmp_path, saved, schedule(saved))
    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(functional, "prefetch_tensor", lambda *_: None)
    # The list is shared by all optimizers of a process.
    monkeypatch.setattr(loaded.page_mng, "paged_tensors", [])
    large, small = loaded.param_groups[0]["params"]
    monkeypatch.setattr(optimizer_states, "_is_paged", lambda optimizer, parameter: parameter is large)
    load_optimizer(tmp_path, loaded, schedule(loaded))
    for parameter, there in zip((large, small), saved.param_groups[0]["params"]):
        for key, value in saved.state[there].items():
            if torch.is_tensor(value):
                assert torch.equal(loaded.state[parameter][key], value)
                paged = parameter is large and key in ("state1", "state2")
                assert getattr(loaded.state[parameter][key], "is_paged", False) == paged
    assert len(loaded.page_mng.paged_tensors) == 2
    # Both optimizers then make the same updates.
    large.data.copy_(saved.param_groups[0]["params"][0].data)
    for optimizer in (saved, loaded):
        step(optimizer)
    assert torch.equal(large, saved.param_groups[0]["params"][0])


def test_which_states_are_paged():
    """The rule of bitsandbytes: states of large parameters on a GPU, with a paged optimizer."""
    paged, plain = SimpleNamespace(is_paged=True), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])

    def parameter(numbers, device):
        return SimpleNamespace(numel=lambda: numbers, device=torch.device(device))

    assert optimizer_states._is_paged(paged, parameter(100_000, "cuda"))
    assert not optimizer_states._is_paged(paged, parameter(99_999, "cuda"))
    assert not optimizer_states._is_paged(paged, parameter(100_000, "cpu"))
    assert not optimizer_states._is_paged(plain, parameter(100_000, "cuda"))


@pytest.mark.parametrize("schedule", each(get_args(ScheduleName), SCHEDULES))
def test_a_schedule_resumes_exactly(schedule, tmp_path, monkeypatch):
    ends_the_same(tmp_path, monkeypatch, schedule=schedule, schedule_options=OPTIONS.get(schedule, {}))


def test_the_fused_optimizer_learns_the_same_as_the_plain_one(tmp_path):
    rows = pack(tmp_path / "pack")
    fused, plain = (
        [entry["loss"] for entry in train(tmp_path / name, rows, spec(optimizer=name)).run["history"]]
        for name in ("adamw_torch_fused", "adamw_torch")
    )
    assert fused == pytest.approx(plain, rel=1e-5)
    assert len(fused) == 18


def arguments(**training):
    made = Training(batch_rows=4, micro_batch_rows=4, learning_rate=0.01, **training)
    return step_arguments(made, items=40, device=torch.device("cpu"))


def test_warm_up_is_a_share_of_the_steps(tmp_path):
    assert arguments(warmup_fraction=0.25)["warmup_steps"] == 3
    # The default share is for the other schedules.
    made = spec(epochs=1, schedule="constant")
    history = train(tmp_path / "work", pack(tmp_path / "pack", rows=12), made).run["history"]
    assert {entry["learning_rate"] for entry in history} == {0.01}


def test_a_schedule_longer_than_the_training_is_refused():
    steps = {"schedule": "warmup_stable_decay", "warmup_fraction": 0.2}
    assert arguments(**steps, schedule_options={"num_decay_steps": 8})["lr_scheduler_kwargs"] == {"num_decay_steps": 8}
    with pytest.raises(SnaketuneError, match=r"training\.schedule_options: .* take 11 steps, and the training has 10"):
        arguments(**steps, schedule_options={"num_decay_steps": 9})
    with pytest.raises(SnaketuneError, match=r"training\.warmup_fraction: 1 of 10 steps leaves none"):
        arguments(schedule="polynomial", warmup_fraction=1)


class Counter:
    """An object that JSON can't restore."""


class Own(torch.Tensor):
    """A tensor subclass, like quantized states."""


@pytest.mark.parametrize("value", [Counter(), torch.ones(2).as_subclass(Own), {1: 2}, torch.float32])
@pytest.mark.parametrize("where", ["state", "group"])
def test_a_state_that_cannot_be_restored_exactly_is_refused(tmp_path, value, where):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if where == "state":
        optimizer.state[parameter]["value"] = [value]
    else:
        optimizer.param_groups[0]["value"] = value
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(SnaketuneError, match=r"a checkpoint can't hold a .* of their state exactly"):
        save_optimizer(tmp_path, optimizer, schedule)
    assert not (tmp_path / "optimizer.json").exists()


def test_groups_are_restored_with_their_types(tmp_path):
    def made(lr):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    saved, loaded = made(0.1), made(0.2)
    value = {"pair": (1, (2.5, None)), "list": [True, (1,)], "text": "x", "nothing": None, "inner": {"a": ()}}
    saved[0].param_groups[0] |= value
    save_optimizer(tmp_path, *saved)
    json.loads((tmp_path / "optimizer.json").read_text())
    load_optimizer(tmp_path, *loaded)
    assert {key: loaded[0].param_groups[0][key] for key in value} == value
    assert loaded[0].param_groups[0]["lr"] == 0.1
