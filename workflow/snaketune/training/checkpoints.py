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
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from snaketune.errors import SnaketuneError

COMPLETE = "complete"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; incomplete ones are removed."""
    complete = []
    for checkpoint in folder.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).is_file():
            complete.append(checkpoint)
        else:
            shutil.rmtree(checkpoint)
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once everything of it is on disk, and keeps only the newest."""

    def on_save(self, args, state, control, **_):
        """Called by the Trainer after a checkpoint was written, on every process."""
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        (folder / f"checkpoint-{state.global_step}" / COMPLETE).touch()
        for older in folder.glob("checkpoint-*"):
            if older.name != f"checkpoint-{state.global_step}":
                shutil.rmtree(older)


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write `optimizer.safetensors` and `optimizer.json` (numbers, groups and the schedule)."""
    state = optimizer.state_dict()
    tensors, numbers = {}, {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{name}"] = value.detach().contiguous()
            else:
                numbers[f"{index}.{name}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    described = {"numbers": numbers, "groups": state["param_groups"], "scheduler": _plain(scheduler.state_dict())}
    (folder / "optimizer.json").write_text(json.dumps(described), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Put back what `save_optimizer` wrote."""
    described = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in (load_file(folder / "optimizer.safetensors") | described["numbers"]).items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = [group | {"betas": tuple(group["betas"])} if "betas" in group else group for group in described["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    scheduler.load_state_dict(described["scheduler"])


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
