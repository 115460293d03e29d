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
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.engine.fsdp import local
from snaketune.engine.tensor_files import Kind, StoredTensors, write
from snaketune.errors import SnaketuneError
from snaketune.files import WRITABLE, digest_file, set_modes, sync_folder, sync_names, write_json

COMPLETE = "complete"
WEIGHTS = "weights"
# The data types and kernels of the training in order of use, as `Compute.about` describes them; the last ones are those of the
# process that wrote the checkpoint. They may change when a training is resumed on another machine.
NUMERICS = "computed_as.json"
# For each process: the sum of the losses since the last log line, and what its meter counted.
UNLOGGED = "unlogged.json"


def complete_checkpoints(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COMPLETE}")]


def damaged_file(checkpoint: Path) -> Path | None:
    """The first file of a checkpoint that is missing or damaged; None if it is complete."""
    try:
        digests = sorted(json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError):
        return checkpoint / COMPLETE
    files = ((checkpoint / name, digest) for name, digest in digests)
    return next((file for file, digest in files if not file.is_file() or digest_file(file) != digest), None)


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints of a killed save, and damaged ones, which would otherwise be resumed from unnoticed."""
    for checkpoint in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if (wrong := damaged_file(checkpoint)) is None:
            continue
        if wrong.name != COMPLETE or wrong.is_file():
            print(f"{wrong} is missing or damaged; the checkpoint is removed", flush=True)
        shutil.rmtree(checkpoint)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return max(complete_checkpoints(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def mark_complete(folder: Path, check_lock: Callable[[], None]) -> None:
    """Write the `complete` file of a checkpoint once all its other files are on disk; called by the main process. Args:
    check_lock: raises if another process has taken over the work folder."""
    set_modes(folder, linked=WRITABLE)
    sync_folder(folder)
    # Digests, so that a checkpoint that the disk has damaged is never resumed from.
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): digest_file(path) for path in files}
    check_lock()
    write_json(folder / COMPLETE, digests)
    sync_names(folder.parent)


def save_numerics(folder: Path, numerics: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NUMERICS, numerics)


def add_numerics(folder: Path, current: dict[str, str]) -> list[dict[str, str]]:
    """Data types and kernels of a checkpoint's training, with those of this process if they are others, which is printed."""
    numerics = json.loads((folder / NUMERICS).read_text(encoding="utf-8"))
    if numerics[-1] == current:
        return numerics
    before, now = (", ".join(sorted(values.values())) for values in (numerics[-1], current))
    print(f"{folder.name} was computed with {before}; resuming with {now}, so the result mixes both", flush=True)
    return [*numerics, current]


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


def first_not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that isn't finite, or None; the same in all processes, which check their own shards."""
    shards = map(local, tensors.values())
    infinite = (
        index for index, tensor in enumerate(shards) if tensor.is_floating_point() and not tensor.isfinite().all()
    )
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
