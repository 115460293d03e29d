"""Checkpoints without pickles, and exact resume.

A checkpoint holds what training changes under the module's own names (a result's names are the Hub's, which split and rename
some weights), and optimizer, schedule and random states, as safetensors plus JSON. It is read back whole or not at all, by as
many processes as there are then. It counts once its `complete` file is there, which has the digest of every other file; a
killed save leaves none, and the checkpoint before it is used.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from snaketune.artifacts.digests import digest_file
from snaketune.artifacts.manifest import sync_names, write_json
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import sync_folder
from snaketune.training.checkpoint.numerics import Numerics, numerics_history, save_numerics
from snaketune.training.checkpoint.optimizer_states import load_optimizer, save_optimizer
from snaketune.training.checkpoint.random_states import file_of, restore, save_random_state
from snaketune.training.checkpoint.tensor_files import StoredTensors, describe_tensor, write
from snaketune.training.parallel.fsdp import full_tensor, is_sharded, local
from snaketune.training.parallel.zero import (
    UnshardedOptimizer,
    gathered_weight,
    is_zero,
    trained_weights,
    unset_deepspeed,
)

COMPLETE = "complete"
WEIGHTS = "weights"


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that a killed save left behind, and damaged ones, whose weights would go on unnoticed."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)
        elif wrong := _damaged(checkpoint):
            print(f"{checkpoint / wrong} is damaged: it isn't what was written; the checkpoint is left out", flush=True)
            shutil.rmtree(checkpoint)


def _damaged(checkpoint: Path) -> str | None:
    """The first file of a complete checkpoint that isn't there as it was written."""
    try:
        written = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
        names = sorted(written)
    except (ValueError, TypeError):
        return COMPLETE
    return next((name for name in names if _digest(checkpoint / name) != written[name]), None)


def _digest(path: Path) -> str:
    return digest_file(path) if path.is_file() else "missing"


def _files_in(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    complete = (path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file())
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.rsplit("-", 1)[1])


class MarkComplete(TrainerCallback):
    """Marks a checkpoint once everything of it is on disk, and keeps only the newest.

    Args:
        check_held: raises where another process has taken the work folder over, which then has checkpoints of its own there.
    """

    def __init__(self, check_held: Callable[[], None]):
        self.check_held = check_held

    def on_save(self, args, state, control, **_):
        """Called by the Trainer after a checkpoint was written, on every process."""
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        newest = folder / f"checkpoint-{state.global_step}"
        sync_folder(newest)
        # What every file holds, so that a checkpoint that a disk has damaged is never gone on from.
        held = {name: _digest(newest / name) for name in _files_in(newest)}
        self.check_held()
        write_json(newest / COMPLETE, held)
        sync_names(folder)
        self.check_held()
        for other in folder.glob("checkpoint-*"):
            if step_of(other) < state.global_step:
                shutil.rmtree(other)


class CheckpointMixin:
    """Mixed into a transformers Trainer: its checkpoints hold safetensors and JSON where it would pickle."""

    # Of the checkpoint that it goes on from, and of now.
    numerics: list[Numerics] = []

    def save_model(self, output_dir=None, _internal_call=False):
        self._save(output_dir)

    def _save(self, output_dir=None, state_dict=None):
        model, first = self.accelerator.unwrap_model(self.model), self.args.should_save
        if first:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_numerics(Path(output_dir), self.numerics or [self.run.compute.about()])
        if is_zero(self.model_wrapped):
            tensors, wrong = trained_weights(model, first)
            self._stop_if(wrong)
            write(Path(output_dir), WEIGHTS, tensors, first)
            return
        self.check_finite()
        save_weights(Path(output_dir), model, first)

    def check_finite(self) -> None:
        """Called by every process, so that all of them stop."""
        model = self.accelerator.unwrap_model(self.model)
        zero = is_zero(self.model_wrapped)
        self._stop_if(trained_weights(model, keep=False)[1] if zero else not_finite(model))

    def _stop_if(self, wrong: str | None) -> None:
        if wrong:
            raise diverged(self.state.global_step, f"{wrong} holds numbers that aren't finite")

    def full_tensor_of(self) -> Callable[[torch.nn.Parameter], torch.Tensor] | None:
        """When the training is done: what gives a weight of the model whole; None where it is so already."""
        if is_zero(self.model_wrapped):
            unset_deepspeed()
            return gathered_weight
        return full_tensor if is_sharded(self.model) else None

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        # DeepSpeed takes the checkpoint's weights from the model, and transformers would look for a checkpoint of its own.
        zero = self.is_deepspeed_enabled
        if zero and resume_from_checkpoint:
            self._load_from_checkpoint(resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None if zero else resume_from_checkpoint)
        if zero:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def create_optimizer(self, *arguments, **keywords):
        made = super().create_optimizer(*arguments, **keywords)
        # DeepSpeed drops empty ones, and others are to read its checkpoints.
        made.param_groups[:] = [group for group in made.param_groups if group["params"]]
        self.groups = [list(group["params"]) for group in made.param_groups]
        return made

    def _plain_optimizer(self) -> Any:
        zero = is_zero(self.model_wrapped)
        return UnshardedOptimizer(self.model_wrapped, self.groups) if zero else self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        now, aloud = self.run.compute.about(), self.is_world_process_zero()
        self.numerics = numerics_history(Path(resume_from_checkpoint), now, aloud)
        load_weights(Path(resume_from_checkpoint), model or self.model)

    def _save_optimizer_and_scheduler(self, output_dir):
        save_optimizer(Path(output_dir), self._plain_optimizer(), self.lr_scheduler, self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self._plain_optimizer(), self.lr_scheduler)

    def _save_rng_state(self, output_dir):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_random_state(file_of(Path(output_dir), self.args.process_index))

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            process, processes = self.args.process_index, self.args.world_size
            restore(Path(checkpoint), process, processes, self.args.seed, self.state.global_step)


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training can change, by the module's own names: every parameter that isn't frozen, and the buffers.

    Tied tensors come once, under the first of their names.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    found: dict[str, torch.Tensor] = {}
    places: set[Any] = set()
    for name, tensor in model.state_dict().items():
        # Of what lies in shards, a process may have nothing.
        sharded = isinstance(tensor, DTensor)
        place = id(parameters[name]) if sharded else (tensor.data_ptr(), tensor.shape, tensor.stride())
        # A 4-bit weight is followed by its constants, named after it.
        if name in frozen or any(name.startswith(f"{owner}.") for owner in frozen) or place in places:
            continue
        if tensor.numel():
            places.add(place)
        found[name] = tensor
    return found


def save_weights(folder: Path, model: torch.nn.Module, first: bool = True) -> None:
    """Write `weights`: `trained_tensors` of the model."""
    write(folder, WEIGHTS, trained_tensors(model), first)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Put back what `save_weights` wrote, all of it.

    Raises:
        SnaketuneError: a tensor is missing, left over, or of another shape or data type; then nothing was changed.
    """
    stored = StoredTensors(folder, WEIGHTS)
    wanted = trained_tensors(model)
    try:
        _compare({name: describe_tensor(*found) for name, found in stored.tensors.items()}, wanted)
    except ValueError as error:
        raise SnaketuneError(f"{stored.path} doesn't fit the model ({error}); remove {folder} to begin again") from None
    stored.read(wanted)


@torch.no_grad()
def copy_trained(trained: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """Give `model` what training changed in `trained`; ValueError if the two aren't made alike."""
    tensors, wanted = trained_tensors(trained), trained_tensors(model)
    _compare({name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, wanted)
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])
    return model


def _compare(there: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    wanted = {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    differs = [
        *(f"{name} is missing" for name in sorted(wanted.keys() - there.keys())),
        *(f"{name} is of no use here" for name in sorted(there.keys() - wanted.keys())),
        *(
            f"{name} is {there[name]} there, {wanted[name]} here"
            for name in sorted(there.keys() & wanted.keys())
            if there[name] != wanted[name]
        ),
    ]
    if differs:
        raise ValueError(f"{differs[0]}; {len(differs)} such tensors")


def not_finite(model: torch.nn.Module) -> str | None:
    """The name of a weight that isn't a finite number, so that no such model is ever kept.

    Of what lies in shards each process looks at its own, and all of them get the name.
    """
    tensors = trained_tensors(model)
    names = list(tensors)
    wrong = next((at for at, tensor in enumerate(tensors.values()) if not _finite(tensor)), len(names))
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        first = torch.tensor(wrong, device=PartialState().device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        wrong = int(first)
    return names[wrong] if wrong < len(names) else None


def _finite(tensor: torch.Tensor) -> bool:
    own = local(tensor)
    return not own.is_floating_point() or bool(own.isfinite().all())


def diverged(step: int, found: str) -> SnaketuneError:
    """The error for a training that has left the finite numbers."""
    return SnaketuneError(
        f"step {step}: {found}: the training diverged and nothing of it is published; lower training.learning_rate or "
        "training.max_grad_norm"
    )
