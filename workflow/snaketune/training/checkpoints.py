"""Checkpoints without pickles, and exact resume.

A checkpoint holds what training changes under the module's own names (a result's names are the Hub's, which split and rename
some weights), and optimizer, schedule and random states, as safetensors plus JSON. It is read back whole or not at all. It
counts once its `complete` file is there; a killed save leaves none, and the checkpoint before it is used.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from snaketune.errors import SnaketuneError
from snaketune.stages.work import sync_folder

COMPLETE = "complete"
WEIGHTS = "weights.safetensors"
SEPARATOR = "/"
TUPLE = "(tuple)"


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
        model = self.accelerator.unwrap_model(self.model)
        # On every process, so that all of them stop.
        check_finite(model, self.state.global_step)
        if self.args.should_save:
            save_weights(Path(output_dir), model)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        load_weights(Path(resume_from_checkpoint), model or self.model)

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


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training can change, by the module's own names: every parameter that isn't frozen, and the buffers.

    Tied tensors come once, under the first of their names.
    """
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    found: dict[str, torch.Tensor] = {}
    places = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        # A 4-bit weight is followed by its constants, named after it.
        if name in frozen or any(name.startswith(f"{owner}.") for owner in frozen) or place in places:
            continue
        if tensor.numel():
            places.add(place)
        found[name] = tensor
    return found


def save_weights(folder: Path, model: torch.nn.Module) -> None:
    """Write `weights.safetensors`: `trained_tensors` of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in trained_tensors(model).items()}, folder / WEIGHTS)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Put back what `save_weights` wrote, all of it.

    Raises:
        SnaketuneError: a tensor is missing, left over, or of another shape or data type; then nothing was changed.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        try:
            _put(model, set(file.keys()), file.get_tensor)
        except ValueError as error:
            raise SnaketuneError(
                f"{folder / WEIGHTS} doesn't fit the model ({error}); remove {folder} to begin again"
            ) from None


def copy_trained(trained: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """Give `model` what training changed in `trained`; ValueError if the two aren't made alike."""
    tensors = trained_tensors(trained)
    _put(model, set(tensors), tensors.__getitem__)
    return model


@torch.no_grad()
def _put(model: torch.nn.Module, there: set[str], get: Callable[[str], torch.Tensor]) -> None:
    wanted = trained_tensors(model)
    differs = [
        *(f"{name} is missing" for name in sorted(wanted.keys() - there)),
        *(f"{name} is of no use here" for name in sorted(there - wanted.keys())),
        *(
            f"{name} is {_described(get(name))} there, {_described(wanted[name])} here"
            for name in sorted(there & wanted.keys())
            if _described(get(name)) != _described(wanted[name])
        ),
    ]
    if differs:
        raise ValueError(f"{differs[0]}; {len(differs)} such tensors")
    for name, tensor in wanted.items():
        tensor.copy_(get(name))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def check_finite(model: torch.nn.Module, step: int) -> None:
    """Raise SnaketuneError if a weight isn't a finite number, so that no such model is ever kept."""
    for name, tensor in trained_tensors(model).items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise diverged(step, f"{name} holds numbers that aren't finite")


def diverged(step: int, found: str) -> SnaketuneError:
    """The error for a training that has left the finite numbers."""
    return SnaketuneError(
        f"step {step}: {found}: the training diverged and nothing of it is published; lower training.learning_rate or "
        "training.max_grad_norm"
    )


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write `optimizer.safetensors` and `optimizer.json` (numbers, groups and the schedule).

    Raises:
        SnaketuneError: the state holds something that would not come back as it is.
    """
    state = optimizer.state_dict()
    tensors, numbers = _flatten(state["state"])
    # Cloned, since 8-bit optimizers share one table among all states, and safetensors stores no tensor twice.
    save_file(
        {key: value.detach().clone().contiguous() for key, value in tensors.items()}, folder / "optimizer.safetensors"
    )
    described = {"numbers": numbers, "groups": state["param_groups"], "scheduler": scheduler.state_dict()}
    (folder / "optimizer.json").write_text(json.dumps(_plain(described)), encoding="utf-8")


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Put back what `save_optimizer` wrote."""
    described = _unplain(json.loads((folder / "optimizer.json").read_text(encoding="utf-8")))
    state: dict[Any, Any] = {}
    for key, value in (load_file(folder / "optimizer.safetensors") | described["numbers"]).items():
        index, *names, last = key.split(SEPARATOR)
        place = state.setdefault(int(index), {})
        for name in names:
            place = place.setdefault(name, {})
        place[last] = value
    optimizer.load_state_dict({"state": state, "param_groups": described["groups"]})
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
        # Tensors of a library's own kind hold more than safetensors keep.
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            tensors[name] = value
        else:
            numbers[name] = value
    return tensors, numbers


def _plain(value: Any) -> Any:
    """As JSON holds it; a tuple as a mapping, so that it comes back as one."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return {TUPLE: _plain(list(value))}
    if type(value) is list:
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    raise SnaketuneError(
        f"training.optimizer, training.schedule: a checkpoint can't hold a {type(value).__name__} of their state exactly, so a "
        "resumed training would be another one; choose others"
    )


def _unplain(value: Any) -> Any:
    if isinstance(value, list):
        return [_unplain(item) for item in value]
    if isinstance(value, dict):
        return tuple(_unplain(value[TUPLE])) if TUPLE in value else {key: _unplain(item) for key, item in value.items()}
    return value


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
