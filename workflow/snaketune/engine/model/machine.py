"""Properties of the machine that a process computes on, read without computing anything: devices, memory, kernels."""

import ctypes
import gc
import os
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from snaketune.engine.model import cgroups
from snaketune.errors import first_line

if TYPE_CHECKING:
    from snaketune.engine.model.devices import Compute

CPU_INFO = Path("/proc/cpuinfo")
# Upper bound in bytes on the GPU memory of a process's CUDA context, kernels included.
CONTEXT = 3 * 2**29
# Messages of libraries that raise a plain RuntimeError when memory runs out.
OOM_MESSAGES = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to allocate",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a process computes on: torch's name of the GPU (empty without one); bytes of the GPU, or of the host
    including swap, and those free for this process; threads that torch uses on the CPU, and cores that it may use; bytes
    of the GPU in use by other processes, estimated; installed attention kernels that fail to load, each with its error."""

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
        >>> h100 = {"gpu": "NVIDIA H100 80GB HBM3", "memory": 85_017_493_504, "free": 84_000_000_000}
        >>> print(Machine(device=torch.device("cuda", 0), threads=8, cores=16, **h100))
        cuda:0 (H100 80GB HBM3)
        >>> rtx = {"gpu": "NVIDIA GeForce RTX 4090", "memory": 25_386_352_640, "free": 25_000_000_000}
        >>> print(Machine(device=torch.device("cuda", 1), threads=8, cores=16, **rtx))
        cuda:1 (GeForce RTX 4090, 24GB)
        >>> print(Machine(device=torch.device("cpu"), gpu="", memory=25 * 10**9, free=9 * 10**9, threads=1, cores=2))
        cpu (1 thread of 2 cores)
        """
        if not self.gpu:
            several = "s" if self.threads > 1 else ""
            return f"{self.device} ({self.threads} thread{several} of {self.cores} core{'s' if self.cores > 1 else ''})"
        name = self.gpu.removeprefix("NVIDIA ")
        return f"{self.device} ({name})" if "GB" in name else f"{self.device} ({name}, {self.memory / 2**30:.0f}GB)"


def inspect_machine(compute: "Compute") -> Machine:
    """Return the machine that `compute` runs on, from what the driver and the system report; no kernel is run."""
    # Imported here, since it imports transformers: a process that fails needs `is_out_of_memory` even without it.
    from snaketune.engine.model.attention import installed_kernels, load_error

    device, gpu, used_by_others = compute.device, "", 0
    if device.type == "cuda":
        # The driver's figure, which excludes the memory of other processes.
        free, memory = torch.cuda.mem_get_info(device)
        gpu = torch.cuda.get_device_name(device)
        used_by_others = max(0, memory - free - torch.cuda.memory_reserved(device) - CONTEXT)
    else:
        host, swap = psutil.virtual_memory(), psutil.swap_memory()
        free, memory = host_memory_limit(), host.total + swap.total
    kernels = installed_kernels(device, compute.dtype)
    return Machine(
        device=device,
        gpu=gpu,
        memory=memory,
        free=free,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        used_by_others=used_by_others,
        broken_kernels=tuple((kernel, error) for kernel in kernels if (error := load_error(kernel))),
    )


def bitsandbytes_error(device: torch.device) -> str:
    """Return why bitsandbytes can't compute on `device`, by its own report; empty if it can, or if its CPU code suffices."""
    try:
        library = import_module("bitsandbytes.cextension").lib
    except Exception as error:
        return f"it can't be imported ({type(error).__name__}: {first_line(error)})"
    if device.type != "cuda" or library.compiled_with_cuda:
        return ""
    # By `vars`, since the attributes of a library that failed to load are functions that raise.
    why = vars(library).get("error_msg", "").partition("\n")[0]
    return f"bitsandbytes {version('bitsandbytes')} runs without its GPU build" + (f" ({why})" if why else "")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or an error in its chain of causes, means that the GPU or the host ran out of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    True
    >>> is_out_of_memory(ValueError("memory"))
    False
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in OOM_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def resident_memory() -> int:
    """Return the resident set size of this process, in bytes."""
    return psutil.Process().memory_info().rss


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: allocated by torch on a GPU, elsewhere the peak resident set size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Preferred, since getrusage's peak includes that of the parent process before exec.
    with suppress(OSError, IndexError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Release unused memory and reset the peak, so that `peak_memory` covers only what is allocated from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with suppress(OSError):
            # See proc_pid_clear_refs(5).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def host_memory_limit() -> int:
    """Return how many bytes this process can use: its resident memory plus what is available."""
    available, in_group = psutil.virtual_memory().available, cgroups.available_memory()
    return resident_memory() + (available if in_group is None else min(available, in_group))


@cache
def processor(table: Path = CPU_INFO) -> str:
    """Return Linux' name for the processor; empty if it has none, as on ARM, and on other systems."""
    try:
        found = re.search(r"^model name\s*:(.*)", table.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
