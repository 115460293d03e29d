"""Memory of a device: how much there is, the most that was taken, and what an error says that tells that it ran out."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

# How libraries say it that raise a plain RuntimeError.
SAID = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to allocate")


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that memory ran out, on the GPU or of the host.

    >>> ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")), ran_out(ValueError("memory"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(said in str(error) for said in SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, elsewhere the most that the process had in memory at once."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Of what the process runs now; getrusage begins with what its parent had.
    if (most := _status("VmHWM:")) is not None:
        return most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def start_again(device: torch.device) -> None:
    """Give back what is free, so that the peak from here on is that of what comes."""
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


def host_limit() -> int | None:
    """Bytes that this process can have: what it has, and what is free or can be freed here; None where nobody says."""
    own = _status("VmRSS:")
    if own is None:
        return None
    free = [found for found in (_available(), _free_in_cgroup()) if found is not None]
    return own + min(free) if free else None


def _status(name: str) -> int | None:
    return _field(Path("/proc/self/status"), name)


def _available() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable:")


def _field(path: Path, name: str) -> int | None:
    try:
        return int(path.read_text(encoding="ascii", errors="replace").partition(name)[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def _free_in_cgroup(root: Path = Path("/sys/fs/cgroup"), table: Path = Path("/proc/self/cgroup")) -> int | None:
    """What a container or a SLURM job has left of its own limit (cgroup v2); of several limits, the least."""
    try:
        own = next(line[3:] for line in table.read_text(encoding="ascii").splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    folder, left = root / own.strip("/"), []
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
            with suppress(OSError, IndexError, ValueError):
                # Cached files give way.
                stat = (group / "memory.stat").read_text(encoding="ascii")
                used -= int(stat.partition("\nfile ")[2].split()[0])
            left.append(limit - used)
        if group == root:
            break
    return min(left, default=None)
