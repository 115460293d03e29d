"""Random states of a training, one file per process.

A training that is resumed by another number of processes seeds each anew from seed, step and rank: the sample order doesn't
depend on these states and stays the same, but dropout, if any, draws other numbers.
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def state_file(folder: Path, process: int) -> Path:
    return folder / f"random-{process}.safetensors"


def restore(folder: Path, process: int, processes: int, seed: int, step: int) -> None:
    """Restore the state of a process, or seed it anew if the checkpoint was written by another number of processes."""
    written = len(list(folder.glob("random-*.safetensors")))
    if written == processes:
        load_random_state(state_file(folder, process))
        return
    print(
        f"{folder.name} was written by {written} processes, {processes} resume from it: rows come in the same order, in the "
        "same steps; dropout, if any, draws other numbers from here on",
        flush=True,
    )
    seeds = np.random.SeedSequence([seed, step, process]).generate_state(3)
    random.seed(int(seeds[0])), np.random.seed(seeds[1]), torch.manual_seed(int(seeds[2]))


def save_random_state(path: Path) -> None:
    """Write the states of Python's, numpy's and torch's generators."""
    name, keys, *numbers = np.random.get_state()
    tensors = {"torch": torch.random.get_rng_state(), "numpy": torch.from_numpy(keys.astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    plain = {"python": random.getstate(), "numpy": [name, *numbers]}
    save_file(tensors, path, metadata={"numbers": json.dumps(plain)})


def load_random_state(path: Path) -> None:
    """Restore the states that `save_random_state` wrote."""
    with safe_open(path, framework="pt") as file:
        plain = json.loads(file.metadata()["numbers"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    version, internal, gauss = plain["python"]
    random.setstate((version, tuple(internal), gauss))
    name, *numbers = plain["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), *numbers))
    torch.random.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
