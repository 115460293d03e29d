"""Half-second speed probe of a machine: a matmul, a memory copy, and a file read from disk.

The probe is the same everywhere, so that figures of one kind of device can be compared between nodes, to detect one that is
hot, shared or throttled.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from snaketune.models.peak_flops import measured_peak

COPY_BYTES, READ_BYTES = 2**27, 2**25
REPEATS = 5


def probe(device: torch.device, folder: Path) -> dict[str, float]:
    """Measure FLOP/s of a square matmul, and bytes per second of a memory copy (read plus written) and of a disk read.

    The matmul is in float32 with one thread on a CPU, else in bfloat16, whatever the training's data type.

    Args:
        folder: a folder on the disk.
    """
    dtype, dtype_name = (torch.float32, "float32") if device.type == "cpu" else (torch.bfloat16, "bfloat16")
    threads = torch.get_num_threads()
    # One thread, so that figures don't depend on the number of threads of a training.
    torch.set_num_threads(1)
    try:
        return {
            "matmul_flops_per_second": measured_peak(device, dtype, dtype_name, 1).flops_per_second,
            "copy_bytes_per_second": _copy(device),
            "disk_bytes_per_second": _disk(folder),
        }
    finally:
        torch.set_num_threads(threads)


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU model as Linux names it on x86; empty elsewhere."""
    with suppress(OSError):
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return ""


def _copy(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return round(2 * COPY_BYTES / best)


def _disk(folder: Path) -> float:
    """Return the read throughput of a new file that is evicted from the page cache, as far as the system allows that."""
    with NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(READ_BYTES))
        file.flush()
        os.fsync(file.fileno())
        with suppress(AttributeError, OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reopened:
            while reopened.read(2**20):
                pass
        return round(READ_BYTES / (time.perf_counter() - started))
