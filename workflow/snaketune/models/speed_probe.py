"""How fast a machine is, in half a second: a matrix product, a copy in memory, a file read from disk.

The same everywhere, so that two figures of one kind of device tell machines apart: a node that is warm, shared, or throttled.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from snaketune.models.peak_flops import measured_peak

COPIED, READ = 2**27, 2**25
TIMES = 5


def probe(device: torch.device, place: Path) -> dict[str, float]:
    """FLOP/s of a square matrix product, bytes per second of a copy (read and written) and of a disk; on a CPU in float32, of
    one thread, elsewhere in bfloat16, whatever a training computes in.

    Args:
        place: a folder on the disk.
    """
    dtype, called = (torch.float32, "float32") if device.type == "cpu" else (torch.bfloat16, "bfloat16")
    threads = torch.get_num_threads()
    # On a CPU trainings compute with more threads or fewer; a machine is to be told from a machine.
    torch.set_num_threads(1)
    try:
        return {
            "matmul_flops_per_second": measured_peak(device, dtype, called, 1).flops_per_second,
            "copy_bytes_per_second": _copy(device),
            "disk_bytes_per_second": _disk(place),
        }
    finally:
        torch.set_num_threads(threads)


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the CPU, as Linux names it on x86; empty elsewhere."""
    with suppress(OSError):
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return ""


def _copy(device: torch.device) -> float:
    source = torch.empty(COPIED, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(TIMES):
        started = time.perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return round(2 * COPIED / best)


def _disk(place: Path) -> float:
    """Of what was just written, as far as the system can be had to forget it."""
    with NamedTemporaryFile(dir=place) as file:
        file.write(os.urandom(READ))
        file.flush()
        os.fsync(file.fileno())
        with suppress(AttributeError, OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as again:
            while again.read(2**20):
                pass
        return round(READ / (time.perf_counter() - started))
