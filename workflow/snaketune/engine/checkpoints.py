"""Checkpoints without pickles, and exact resume.

A checkpoint holds the weights that training changes by the module's own names, and optimizer, schedule and random states. Any
number of processes loads it, completely or not at all. It is valid once its `complete` file exists, which has the digests of
all other files; a killed save writes no such file, and the previous checkpoint is used.
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

from snaketune.engine import random_states
from snaketune.engine.average import AveragedWeights
from snaketune.engine.fsdp import full_tensor, is_sharded, local
from snaketune.engine.optimizer_states import load_optimizer, save_optimizer
from snaketune.engine.tensor_files import Kind, StoredTensors, write
from snaketune.engine.zero import (
    UnshardedOptimizer,
    gathered_weight,
    is_zero,
    trained_weights,
)
from snaketune.errors import SnaketuneError
from snaketune.files import digest_file, sync_names, write_json
from snaketune.stages.cache.payload_files import WRITABLE, set_modes, sync_folder

COMPLETE = "complete"
WEIGHTS = "weights"
# The data types and kernels of the training in order of use, as `Compute.about` describes them; the last ones are those of the
# process that wrote the checkpoint. They may change when a training is resumed on another machine.
NUMERICS = "computed_as.json"


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints of a killed save, and damaged ones, which would otherwise be resumed from unnoticed."""
    for checkpoint in folder.glob("checkpoint-*"):
        if (checkpoint / COMPLETE).is_file():
            try:
                digests = sorted(json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8")).items())
            except (ValueError, AttributeError):
                digests = [(COMPLETE, None)]
            files = ((checkpoint / name, digest) for name, digest in digests)
            wrong = next((file for file, digest in files if not file.is_file() or digest_file(file) != digest), None)
            if wrong is None:
                continue
            print(f"{wrong} is missing or damaged; the checkpoint is removed", flush=True)
        shutil.rmtree(checkpoint)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = (path for path in folder.glob("checkpoint-*") if (path / COMPLETE).is_file())
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def mark_complete(folder: Path, check_held: Callable[[], None]) -> None:
    """Write the `complete` file of a checkpoint once all its other files are on disk; called by the main process. Args:
    check_held: raises if another process has taken over the work folder."""
    set_modes(folder, linked=WRITABLE)
    sync_folder(folder)
    # Digests, so that a checkpoint that the disk has damaged is never resumed from.
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): digest_file(path) for path in files}
    check_held()
    write_json(folder / COMPLETE, digests)
    sync_names(folder.parent)


class CheckpointMixin:
    """Mixin for transformers' Trainer: its checkpoints are safetensors and JSON instead of pickles."""

    # Those of the checkpoint that is resumed from, then those of this process; see NUMERICS.
    numerics: list[dict[str, str]] = []
    average: AveragedWeights | None = None

    def save_model(self, output_dir=None, _internal_call=False):
        self._save(output_dir)

    def _save(self, output_dir=None, state_dict=None):
        folder, is_main = Path(output_dir), self.args.should_save
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / NUMERICS, self.numerics or [self.run.compute.about()])
        write(folder, WEIGHTS, self.finite_tensors(keep=is_main), is_main)
        if self.average:
            self.average.save(folder, is_main)

    def on_save(self, args, state, control, **_):
        """Mark the checkpoint as complete once all its files are on disk, and remove older ones; called on every process."""
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        # Another process that has taken over the work folder may write its checkpoints there.
        folder, check_held = Path(args.output_dir), self.run.work.check_held
        mark_complete(folder / f"checkpoint-{state.global_step}", check_held)
        check_held()
        for other in folder.glob("checkpoint-*"):
            if step_of(other) < state.global_step:
                shutil.rmtree(other)

    def finite_tensors(self, keep: bool = False) -> dict[str, torch.Tensor]:
        """Return the trained tensors; raise SnaketuneError in every process, which all call it, if a weight isn't finite.

        Args:
            keep: whether this process receives the tensors that DeepSpeed has to gather.
        """
        model = self.accelerator.unwrap_model(self.model)
        if is_zero(self.model_wrapped):
            tensors, wrong = trained_weights(model, keep)
        else:
            tensors = trained_tensors(model)
            wrong = _not_finite(tensors)
        if wrong:
            raise diverged(self.state.global_step, f"{wrong} holds numbers that aren't finite")
        return tensors

    def full_tensor_of(self) -> Callable[[torch.nn.Parameter], torch.Tensor] | None:
        """The function that gathers a weight; None if the model isn't sharded. Called last: it ends the use of DeepSpeed."""
        if is_zero(self.model_wrapped):
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            # Afterwards a single process can load a model on its own.
            unset_hf_deepspeed_config()
            return gathered_weight
        return full_tensor if is_sharded(self.model) else None

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # DeepSpeed takes its weights from the model, so they are loaded first; transformers would look for its own checkpoint.
        if resume_from_checkpoint:
            self._load_from_checkpoint(resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def create_optimizer(self, *arguments, **keywords):
        optimizer = super().create_optimizer(*arguments, **keywords)
        # DeepSpeed drops empty groups; without them everywhere, checkpoints are the same with and without DeepSpeed.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    @property
    def _unsharded_optimizer(self) -> Any:
        return UnshardedOptimizer(self.model_wrapped, self.groups) if is_zero(self.model_wrapped) else self.optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        folder, current = Path(resume_from_checkpoint), self.run.compute.about()
        self.numerics = json.loads((folder / NUMERICS).read_text(encoding="utf-8"))
        if self.numerics[-1] != current:
            before, now = (", ".join(sorted(numerics.values())) for numerics in (self.numerics[-1], current))
            print(
                f"{folder.name} was computed with {before}; resuming with {now}, so the result mixes both", flush=True
            )
            self.numerics.append(current)
        load_weights(folder, model or self.model)
        if self.average:
            self.average.load(folder)

    def _save_optimizer_and_scheduler(self, output_dir):
        save_optimizer(Path(output_dir), self._unsharded_optimizer, self.lr_scheduler, self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self._unsharded_optimizer, self.lr_scheduler)

    def _save_rng_state(self, output_dir):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        random_states.save_random_state(random_states.state_file(Path(output_dir), self.args.process_index))

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            process, processes = self.args.process_index, self.args.world_size
            random_states.restore(Path(checkpoint), process, processes, self.args.seed, self.state.global_step)


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that training can change, by the module's own names: all parameters that aren't frozen, and the buffers.

    Tied tensors are included once, under the first of their names.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    trained: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    for name, tensor in model.state_dict().items():
        # The local part of a sharded tensor may be empty, so it has no address to be identified by.
        sharded = isinstance(tensor, DTensor)
        identity = id(parameters[name]) if sharded else (tensor.data_ptr(), tensor.shape, tensor.stride())
        # The quantization constants of a 4-bit weight are named after it.
        if name in frozen or any(name.startswith(f"{owner}.") for owner in frozen) or identity in seen:
            continue
        if tensor.numel():
            seen.add(identity)
        trained[name] = tensor
    return trained


def save_weights(folder: Path, model: torch.nn.Module) -> None:
    """Write the model's `trained_tensors`, as a single process does."""
    write(folder, WEIGHTS, trained_tensors(model), is_main=True)


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Load the `trained_tensors` of a checkpoint.

    Raises:
        SnaketuneError: a tensor is missing, unexpected, or of another shape or data type; the model is then unchanged.
    """
    stored, wanted = StoredTensors(folder, WEIGHTS), trained_tensors(model)
    try:
        _check_same(stored.tensors, wanted)
    except ValueError as error:
        raise SnaketuneError(f"{stored.path} doesn't fit the model ({error}); remove {folder} to begin again") from None
    stored.read(wanted)


@torch.no_grad()
def copy_trained(trained: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """Copy the trained tensors of `trained` to `model`; raise ValueError if their names, shapes or data types differ."""
    tensors, wanted = trained_tensors(trained), trained_tensors(model)
    _check_same({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, wanted)
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])
    return model


def _check_same(stored: dict[str, Kind], tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if names, data types or shapes differ."""
    there = {name: _describe(*kind) for name, kind in stored.items()}
    here = {name: _describe(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    others = [name for name in sorted(there.keys() & here.keys()) if there[name] != here[name]]
    differences = [
        *(f"{name} is missing" for name in sorted(here.keys() - there.keys())),
        *(f"{name} isn't in the model" for name in sorted(there.keys() - here.keys())),
        *(f"{name} is {there[name]} there, {here[name]} in the model" for name in others),
    ]
    if differences:
        raise ValueError(f"{differences[0]}; {len(differences)} such tensors")


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that isn't finite, or None; the same in all processes, which check their own shards."""
    own = map(local, tensors.values())
    infinite = (index for index, tensor in enumerate(own) if tensor.is_floating_point() and not tensor.isfinite().all())
    first = next(infinite, len(tensors))
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        lowest = torch.tensor(first, device=PartialState().device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        first = int(lowest)
    return [*tensors, None][first]


def diverged(step: int, evidence: str) -> SnaketuneError:
    """Return the error for a training whose loss or weights aren't finite."""
    return SnaketuneError(
        f"step {step}: {evidence}: the training diverged and nothing of it is published; lower training.learning_rate or "
        "training.max_grad_norm"
    )
