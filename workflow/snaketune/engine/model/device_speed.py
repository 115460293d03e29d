"""How fast a device is: its peak matmul throughput, the reference for model FLOPs utilization; and a probe of machines.

Peaks of known GPUs come from a table of data sheets, everything else is measured. The probe takes half a second and is the same
everywhere, so that figures of one kind of device can be compared between nodes, to detect one that is hot, shared or throttled.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from snaketune.engine.model.devices import Compute

TERA = 10**12
COPY_BYTES, READ_BYTES = 2**27, 2**25
COPIES = 5


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak FLOP/s of one device in one data type, and the source of the figure."""

    flops_per_second: float
    source: str


# Dense peaks in TFLOP/s, as (16 bit with float32 accumulation, TF32, float32): vendors quote twice as much for tensor cores
# where half of the weights are zero ("with sparsity"). Names are torch's, without vendor, product line and memory. None: the
# GPU has no such unit. Variants that aren't listed (laptops, MIG slices, others of a family) run at other clocks: measured.
# bfloat16 and float16 are equally fast on all of these but those of NO_BFLOAT16. Sources: NVIDIA's and AMD's data sheets (HGX
# B200 and GB200 NVL72 by GPU; of the A10G the one that AWS publishes); of RTX cards the appendices A of NVIDIA's papers on the
# architectures Ampere GA102, Ada (and that of the RTX 6000 Ada) and RTX Blackwell.
PEAKS: dict[tuple[str, ...], tuple[float | None, float | None, float]] = {
    # The GH200 is the same chip as the H100 SXM.
    ("h100 hbm3", "h100 sxm5", "h200", "gh200"): (989.4, 494.7, 66.9),
    ("h100 pcie",): (756.5, 378.0, 51.2),
    ("h100 nvl", "h200 nvl"): (835.5, 417.5, 60.0),
    ("b200",): (2250.0, 1125.0, 75.0),
    ("gb200",): (2500.0, 1250.0, 80.0),
    ("a100 sxm4", "a100 pcie"): (312.0, 156.0, 19.5),
    ("a30",): (165.0, 82.0, 10.3),
    ("a40",): (149.7, 74.8, 37.4),
    ("a10",): (125.0, 62.5, 31.2),
    ("a10g",): (70.0, 35.0, 35.0),
    ("l4",): (121.0, 60.0, 30.3),
    ("l40",): (181.0, 90.5, 90.5),
    ("l40s",): (362.0, 183.0, 91.6),
    # GeForce cards accumulate in float32 at half rate, RTX A ones at full.
    ("rtx 3080",): (59.5, 29.8, 29.8),
    ("rtx 3090",): (71.0, 35.6, 35.6),
    ("rtx a6000",): (154.8, 77.4, 38.7),
    ("rtx 4080",): (97.5, 48.7, 48.7),
    ("rtx 4090",): (165.2, 82.6, 82.6),
    ("rtx 6000 ada generation",): (364.2, 182.1, 91.1),
    ("rtx 5080",): (112.6, 56.3, 56.3),
    ("rtx 5090",): (209.5, 104.8, 104.8),
    # torch shows a MI250X as two devices, so this is half of its peak.
    ("mi250x",): (191.5, None, 47.9),
    ("mi300x", "mi325x"): (1307.4, 653.7, 163.4),
    ("t4",): (65.0, None, 8.1),
    ("v100 sxm2",): (125.0, None, 15.7),
    ("v100 pcie",): (112.0, None, 14.0),
}
NO_BFLOAT16 = {"t4", "v100 sxm2", "v100 pcie"}
DECORATION = re.compile(r"\b(nvidia|tesla|geforce|amd|instinct)\b|[- ]\d+ ?gb\b|-")


def peak_of(compute: Compute) -> Peak:
    """Return the peak of this process's device in the data type of its products."""
    on_gpu = compute.device.type == "cuda"
    tf32 = on_gpu and compute.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    dtype_name = "tf32" if tf32 else str(compute.dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name(compute.device) if on_gpu else ""
    if known := name and known_peak(name, dtype_name):
        return Peak(flops_per_second=known, source=f"data sheet of {name}, dense {dtype_name}")
    with compute.training_precision():
        dtype_name += "" if compute.matmul_precision == "highest" else f" at precision {compute.matmul_precision}"
        return measured_peak(compute.device, compute.dtype, dtype_name, torch.get_num_threads())


def known_peak(name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a GPU by torch's name for it; None if the table doesn't have it.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16"), known_peak("NVIDIA A100-SXM4-40GB", "tf32")
    (989400000000000.0, 156000000000000.0)
    >>> known_peak("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"), known_peak("Tesla T4", "bfloat16")
    (None, None)
    """
    plain = " ".join(DECORATION.sub(" ", name.casefold()).split())
    row = next((figures for names, figures in PEAKS.items() if plain in names), None)
    if row is None or (dtype == "bfloat16" and plain in NO_BFLOAT16):
        return None
    half, tf32, single = row
    figure = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single}.get(dtype)
    return figure and figure * TERA


@cache
def measured_peak(
    device: torch.device, dtype: torch.dtype, dtype_name: str, threads: int, seconds: float = 0.1
) -> Peak:
    """Measure the fastest of a few square matmuls, as models multiply, once per process. The matrices come from a separate
    generator, so that the training's random numbers don't change."""
    on_cpu = device.type == "cpu"
    # A GPU gets several matmuls per synchronization, so that launch overhead doesn't count.
    side, calls = (1024, 1) if on_cpu else (4096, 16)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator).to(device, dtype) for _ in range(2))
    best, begin = float("inf"), time.perf_counter()
    # The first repetition is a warm-up.
    for repeat in range(50):
        started = time.perf_counter()
        for _ in range(calls):
            torch.mm(left, right)
        now = _finished(device)
        if repeat:
            best = min(best, (now - started) / calls)
        if repeat >= 2 and now - begin > seconds:
            break
    on = f", {threads} thread{'s' if threads > 1 else ''}" if on_cpu else ""
    return Peak(flops_per_second=2 * side**3 / best, source=f"measured matrix product, {dtype_name}{on}")


def _finished(device: torch.device) -> float:
    """Wait for the device; return the time."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def probe(device: torch.device, folder: Path) -> dict[str, float]:
    """Measure FLOP/s of a square matmul (in float32 with one thread on a CPU, else in bfloat16, whatever the training's
    data type), and bytes per second of a memory copy (read plus written) and of a read from the disk of `folder`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    threads = torch.get_num_threads()
    # One thread, so that figures don't depend on the number of threads of a training.
    torch.set_num_threads(1)
    try:
        matmul = measured_peak(device, dtype, str(dtype).removeprefix("torch."), 1)
        return {
            "matmul_flops_per_second": matmul.flops_per_second,
            "copy_bytes_per_second": _copy(device),
            "disk_bytes_per_second": _disk(folder),
        }
    finally:
        torch.set_num_threads(threads)


def _copy(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, _finished(device) - started)
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
