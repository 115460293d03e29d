"""Properties of the machine that a process computes on, read without computing anything."""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import psutil
import torch

from snaketune.models.attention import installed_kernels, load_error
from snaketune.models.device_memory import host_memory_limit
from snaketune.models.devices import Compute

# Upper bound in bytes on the GPU memory of a process's CUDA context, kernels included.
CONTEXT = 3 * 2**29


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a process computes on.

    Attributes:
        gpu: torch's name of the GPU; empty without one.
        memory: total bytes of the GPU, or of the host including swap.
        free: bytes of `memory` available to this process.
        threads: threads that torch uses on the CPU.
        cores: CPU cores that this process may use.
        used_by_others: bytes of the GPU in use by other processes, estimated from its free memory.
        broken_kernels: installed attention kernels that fail to load, each with its error.
    """

    device: torch.device
    gpu: str
    memory: int
    free: int
    threads: int
    cores: int
    used_by_others: int = 0
    broken_kernels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """
        >>> print(Machine(device=torch.device("cuda", 0), gpu="NVIDIA H100 80GB HBM3", memory=85_017_493_504,
        ...               free=84_000_000_000, threads=8, cores=16))
        cuda:0 (H100 80GB HBM3)
        >>> print(Machine(device=torch.device("cuda", 1), gpu="NVIDIA GeForce RTX 4090", memory=25_386_352_640,
        ...               free=25_000_000_000, threads=8, cores=16))
        cuda:1 (GeForce RTX 4090, 24GB)
        >>> print(Machine(device=torch.device("cpu"), gpu="", memory=25_000_000_000, free=9_000_000_000, threads=1,
        ...               cores=2))
        cpu (1 thread of 2 cores)
        """
        if not self.gpu:
            several = "s" if self.threads > 1 else ""
            return f"{self.device} ({self.threads} thread{several} of {self.cores} core{'s' if self.cores > 1 else ''})"
        name = self.gpu.removeprefix("NVIDIA ")
        return f"{self.device} ({name})" if "GB" in name else f"{self.device} ({name}, {self.memory / 2**30:.0f}GB)"


def inspect_machine(compute: Compute) -> Machine:
    """Return the machine that `compute` runs on, from what the driver and the system report; no kernel is run."""
    device, used_by_others = compute.device, 0
    if device.type == "cuda":
        # The driver's figure, which excludes the memory of other processes.
        free, memory = torch.cuda.mem_get_info(device)
        used_by_others = max(0, memory - free - torch.cuda.memory_reserved(device) - CONTEXT)
    else:
        host, swap = psutil.virtual_memory(), psutil.swap_memory()
        free, memory = host_memory_limit() or host.available, host.total + swap.total
    return Machine(
        device=device,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        memory=memory,
        free=free,
        threads=torch.get_num_threads(),
        used_by_others=used_by_others,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        broken_kernels=tuple(
            (kernel, error) for kernel in installed_kernels(device, compute.dtype) if (error := load_error(kernel))
        ),
    )


def resident_memory() -> int:
    """Return the resident set size of this process, in bytes."""
    return psutil.Process().memory_info().rss


def bitsandbytes_error(device: torch.device) -> str:
    """Return why bitsandbytes can't compute on `device`, by its own report; empty if it can, or if its CPU code suffices."""
    try:
        library = import_module("bitsandbytes.cextension").lib
    except Exception as error:
        return f"it can't be imported ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})"
    if device.type != "cuda" or library.compiled_with_cuda:
        return ""
    # By `vars`, since the attributes of a library that failed to load are functions that raise.
    why = vars(library).get("error_msg", "")
    return f"bitsandbytes {version('bitsandbytes')} runs without its GPU build" + (
        f" ({why.splitlines()[0]})" if why else ""
    )
