"""Checkpoints: no pickle in them, exact states out of them, half-written ones ignored."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snaketune.engine.checkpoints import (
    COMPLETE,
    last_checkpoint,
    remove_incomplete,
)
from snaketune.engine.features import Options, TrainingFeatures
from snaketune.engine.optimizer_states import load_optimizer, save_optimizer
from snaketune.engine.random_states import load_random_state, save_random_state
from snaketune.errors import SnaketuneError


def trained(steps: int, seed: int = 0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    scheduler.step()


def test_optimizer_and_schedule_resume_exactly(tmp_path):
    model, optimizer, scheduler = trained(3)
    save_optimizer(tmp_path, optimizer, scheduler)
    other, other_optimizer, other_scheduler = trained(0)
    other.load_state_dict(model.state_dict())
    load_optimizer(tmp_path, other_optimizer, other_scheduler)
    for parts in ((model, optimizer, scheduler), (other, other_optimizer, other_scheduler)):
        step(*parts)
    assert torch.equal(model.weight, other.weight)
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer.json", "optimizer.safetensors"]


def test_random_states_are_restored(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    np.random.standard_normal()  # leaves a cached second value behind
    save_random_state(tmp_path / "random.safetensors")
    drawn = (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())
    load_random_state(tmp_path / "random.safetensors")
    assert drawn == (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist())


def test_states_of_8_bit_optimizers_are_restored(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameters = [torch.nn.Parameter(torch.randn(64, 80)), torch.nn.Parameter(torch.randn(64, 80))]

    def optimizer_after(steps: int):
        optimizer = bitsandbytes.optim.AdamW8bit([p.detach().clone().requires_grad_() for p in parameters], lr=0.1)
        for _ in range(steps):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return optimizer

    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    saved, loaded = optimizer_after(2), optimizer_after(0)
    save_optimizer(tmp_path, saved, scheduler_of(saved))
    load_optimizer(tmp_path, loaded, scheduler_of(loaded))
    for one, other in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert one["step"] == other["step"]
        assert torch.equal(one["state1"], other["state1"])


def test_the_newest_complete_checkpoint_is_used_and_incomplete_ones_are_removed(tmp_path):
    for number, complete in ((5, True), (10, True), (100, False)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{number}" / COMPLETE).write_text("{}")
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    remove_incomplete(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-5"]
    assert last_checkpoint(tmp_path / "nothing") is None


def mark_saved(folder, state, check_held=lambda: None):
    trainer = SimpleNamespace(options=Options(check_lock=check_held))
    TrainingFeatures.on_save(trainer, SimpleNamespace(output_dir=str(folder)), state, None)


def test_a_process_that_lost_the_folder_marks_nothing_and_removes_nothing(tmp_path):
    """Its machine hung while it saved, and another machine has resumed the training meanwhile."""
    for number in (2, 4, 8):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}/weights.safetensors").write_text("weights")
    for number in (2, 8):
        (tmp_path / f"checkpoint-{number}/complete").write_text("{}")
    # Of something else than a training of ours.
    (tmp_path / "checkpoint-1-merged").mkdir()
    state = SimpleNamespace(is_world_process_zero=True, global_step=4)

    def lost() -> None:
        raise SnaketuneError("another process works here")

    with pytest.raises(SnaketuneError, match="another process"):
        mark_saved(tmp_path, state, lost)
    assert len(list(tmp_path.iterdir())) == 4 and not (tmp_path / "checkpoint-4" / COMPLETE).exists()
    # Nor if it doesn't notice: newer checkpoints aren't its own.
    mark_saved(tmp_path, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1-merged", "checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize("name", ["weights.safetensors", "shards/random-1.safetensors", "trainer_state.json", COMPLETE])
def test_a_damaged_checkpoint_is_removed_and_named(tmp_path, capsys, name):
    """Resuming with a single changed byte would give other weights than an undisturbed run."""
    newest = tmp_path / "checkpoint-10"
    for file in ("weights.safetensors", "shards/random-1.safetensors", "trainer_state.json"):
        (newest / file).parent.mkdir(parents=True, exist_ok=True)
        (newest / file).write_text(f"of {file}")
    state = SimpleNamespace(is_world_process_zero=True, global_step=10)
    mark_saved(tmp_path, state)
    remove_incomplete(tmp_path)
    assert last_checkpoint(tmp_path) == newest
    content = bytearray((newest / name).read_bytes())
    content[1] ^= 1
    (newest / name).write_bytes(content)
    remove_incomplete(tmp_path)
    assert last_checkpoint(tmp_path) is None
    assert f"checkpoint-10/{name} is missing or damaged" in capsys.readouterr().out
