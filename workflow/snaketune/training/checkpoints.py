"""Checkpoints without pickles, and exact resume.

A checkpoint holds the weights as transformers saves them, and optimizer, schedule and random states as safetensors plus
JSON. It counts once its `complete` file is there; a killed save leaves none, and the checkpoint before it is used.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from snaketune.artifacts.work import sync_folder
from snaketune.errors import SnaketuneError

COMPLETE = "complete"
SEPARATOR = "/"


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that a killed save left behind."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    complete = (path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file())
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once everything of it is on disk, and keeps only the newest."""

    def on_save(self, args, state, control, **_):
        """Called by the Trainer after a checkpoint was written, on every process."""
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        newest = folder / f"checkpoint-{state.global_step}"
        sync_folder(newest)
        (newest / COMPLETE).touch()
        for older in folder.glob("checkpoint-*"):
            if older != newest:
                shutil.rmtree(older)


class SafeCheckpoints:
    """Mixed into a transformers Trainer: its checkpoints hold safetensors and JSON where it would pickle."""

    def _save(self, output_dir=None, state_dict=None):
        if self.args.should_save:
            self.accelerator.unwrap_model(self.model).save_pretrained(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.args.should_save:
            save_optimizer(Path(output_dir), self.optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self.optimizer, self.lr_scheduler)

    def _save_rng_state(self, output_dir):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_random_state(Path(output_dir) / f"random-{self.args.process_index}.safetensors")

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            load_random_state(Path(checkpoint) / f"random-{self.args.process_index}.safetensors")


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write `optimizer.safetensors` and `optimizer.json` (numbers, groups and the schedule)."""
    state = optimizer.state_dict()
    tensors, numbers = _flatten(state["state"])
    # Cloned, since 8-bit optimizers share one table among all states, and safetensors stores no tensor twice.
    save_file(
        {key: value.detach().clone().contiguous() for key, value in tensors.items()}, folder / "optimizer.safetensors"
    )
    described = {"numbers": numbers, "groups": state["param_groups"], "scheduler": _plain(scheduler.state_dict())}
    (folder / "optimizer.json").write_text(json.dumps(described), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Put back what `save_optimizer` wrote."""
    described = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state: dict[Any, Any] = {}
    for key, value in (load_file(folder / "optimizer.safetensors") | described["numbers"]).items():
        index, *names, last = key.split(SEPARATOR)
        place = state.setdefault(int(index), {})
        for name in names:
            place = place.setdefault(name, {})
        place[last] = value
    groups = [group | {"betas": tuple(group["betas"])} if "betas" in group else group for group in described["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    scheduler.load_state_dict(described["scheduler"])


def _flatten(state: dict[Any, Any], path: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the plain values of a nested state, by their keys joined with SEPARATOR."""
    tensors, numbers = {}, {}
    for key, value in state.items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            inner_tensors, inner_numbers = _flatten(value, name + SEPARATOR)
            tensors |= inner_tensors
            numbers |= inner_numbers
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return tensors, numbers


def save_random_state(path: Path) -> None:
    """Write the states of Python's, numpy's and torch's generators."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {"torch": torch.random.get_rng_state(), "numpy": torch.from_numpy(keys.astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    numbers = {"python": [version, list(internal), gauss], "numpy": [name, position, has_gauss, cached]}
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def load_random_state(path: Path) -> None:
    """Put back what `save_random_state` wrote.

    Raises:
        SnaketuneError: the file isn't there (the checkpoint is of another number of processes).
    """
    from safetensors import safe_open

    if not path.is_file():
        raise SnaketuneError(f"{path} is missing: resume with as many GPUs as the run was started with")
    with safe_open(path, framework="pt") as file:
        numbers = json.loads(file.metadata()["numbers"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    name, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.random.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, int | float | str | bool | list | None)}
