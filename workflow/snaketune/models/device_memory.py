"""Memory of a device: available memory, peak memory, and detection of out-of-memory errors."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

# Messages of libraries that raise a plain RuntimeError when memory runs out.
OOM_MESSAGES = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to allocate",
)


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


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: allocated by torch on a GPU, elsewhere the peak resident set size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Preferred, since getrusage's peak includes that of the parent process before exec.
    if (peak := _status("VmHWM:")) is not None:
        return peak
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


def host_memory_limit() -> int | None:
    """Return how many bytes this process can use: its resident memory plus what is available; None where unknown."""
    own = _status("VmRSS:")
    if own is None:
        return None
    available = [size for size in (_available(), _cgroup_available()) if size is not None]
    return own + min(available) if available else None


def _status(name: str) -> int | None:
    return _field(Path("/proc/self/status"), name)


def _available() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable:")


def _field(path: Path, name: str) -> int | None:
    try:
        return int(path.read_text(encoding="ascii", errors="replace").partition(name)[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def _cgroup_available(root: Path = Path("/sys/fs/cgroup"), table: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes available below the memory limit of a container or SLURM job (cgroup v2); the least of nested limits."""
    try:
        own = next(line[3:] for line in table.read_text(encoding="ascii").splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    folder, available = root / own.strip("/"), []
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
            with suppress(OSError, IndexError, ValueError):
                # The page cache is reclaimed on demand.
                stat = (group / "memory.stat").read_text(encoding="ascii")
                used -= int(stat.partition("\nfile ")[2].split()[0])
            available.append(limit - used)
        if group == root:
            break
    return min(available, default=None)
