"""The machine that a process computes on, as far as it can be told without computing anything."""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import psutil
import torch

from snaketune.models.attention import installed_kernels, load_trouble
from snaketune.models.device_memory import host_limit
from snaketune.models.devices import Compute

# Bytes of a GPU that CUDA itself takes for a process, kernels included; more than was ever seen.
CONTEXT = 3 * 2**29


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process computes on.

    Attributes:
        card: torch's name for a GPU; empty without one.
        memory, free: bytes, of the GPU, else of the host with its swap; of these, what this process can have.
        others: bytes of the GPU that other processes hold, estimated from what is free.
        threads, cores: that a CPU computes with, and that this process may use.
        unloadable: kernels of attention that are installed and don't load, each with why.
    """

    device: torch.device
    card: str
    memory: int
    free: int
    threads: int
    cores: int
    others: int = 0
    unloadable: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """
        >>> print(Machine(device=torch.device("cuda", 0), card="NVIDIA H100 80GB HBM3", memory=85_017_493_504,
        ...               free=84_000_000_000, threads=8, cores=16))
        cuda:0 (H100 80GB HBM3)
        >>> print(Machine(device=torch.device("cuda", 1), card="NVIDIA GeForce RTX 4090", memory=25_386_352_640,
        ...               free=25_000_000_000, threads=8, cores=16))
        cuda:1 (GeForce RTX 4090, 24GB)
        >>> print(Machine(device=torch.device("cpu"), card="", memory=25_000_000_000, free=9_000_000_000, threads=1, cores=2))
        cpu (1 thread of 2 cores)
        """
        if not self.card:
            several = "s" if self.threads > 1 else ""
            return f"{self.device} ({self.threads} thread{several} of {self.cores} core{'s' if self.cores > 1 else ''})"
        name = self.card.removeprefix("NVIDIA ")
        return f"{self.device} ({name})" if "GB" in name else f"{self.device} ({name}, {self.memory / 2**30:.0f}GB)"


def look(compute: Compute) -> Machine:
    """At what this process computes with. Reads the driver's and the system's own words, and runs nothing."""
    device, others = compute.device, 0
    if device.type == "cuda":
        # As the driver sees it: other processes' memory isn't free.
        free, memory = torch.cuda.mem_get_info(device)
        others = max(0, memory - free - torch.cuda.memory_reserved(device) - CONTEXT)
    else:
        host, swap = psutil.virtual_memory(), psutil.swap_memory()
        free, memory = host_limit() or host.available, host.total + swap.total
    return Machine(
        device=device,
        card=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        memory=memory,
        free=free,
        threads=torch.get_num_threads(),
        others=others,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        unloadable=tuple(
            (kernel, trouble)
            for kernel in installed_kernels(device, compute.dtype)
            if (trouble := load_trouble(kernel))
        ),
    )


def resident_memory() -> int:
    """Bytes that this process has in memory now."""
    return psutil.Process().memory_info().rss


def bitsandbytes_trouble(device: torch.device) -> str:
    """Why bitsandbytes can't compute on a device, by what it says of itself; empty if it can, or where its CPU code will do."""
    try:
        library = import_module("bitsandbytes.cextension").lib
    except Exception as error:
        return f"it can't be imported ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})"
    if device.type != "cuda" or library.compiled_with_cuda:
        return ""
    # Other names lead to functions that raise.
    why = vars(library).get("error_msg", "")
    return f"bitsandbytes {version('bitsandbytes')} runs without its GPU build" + (
        f" ({why.splitlines()[0]})" if why else ""
    )
