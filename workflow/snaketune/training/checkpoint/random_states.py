"""The states of the generators that a training draws from, a file for each process.

Where as many processes go on as have stopped, each takes its own up again. Another number of them can't draw what those would
have drawn: each begins anew, from seed, step and its own number. The order of the rows doesn't come from here and stays the
same; dropout, where there is any, drops others than it would have.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def file_of(folder: Path, process: int) -> Path:
    """Where a checkpoint holds the state of a process."""
    return folder / f"random-{process}.safetensors"


def restore(folder: Path, process: int, processes: int, seed: int, step: int) -> None:
    """Put the state of a process back, or begin anew if the checkpoint was made by another number of processes."""
    there = len(list(folder.glob("random-*.safetensors")))
    if there == processes:
        load_random_state(file_of(folder, process))
        return
    if process == 0:
        print(
            f"{folder.name} was made by {there} processes, {processes} go on: rows come in the same order, in the same steps; "
            "dropout, if any, draws other numbers from here on",
            flush=True,
        )
    drawn = np.random.SeedSequence([seed, step, process]).generate_state(3)
    random.seed(int(drawn[0])), np.random.seed(drawn[1]), torch.manual_seed(int(drawn[2]))


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
    """Put back what `save_random_state` wrote."""
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
