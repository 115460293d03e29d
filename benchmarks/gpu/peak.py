"""What the device could do: the peak that shares of it refer to."""

import time

import torch


def peak_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of the best of several square matrix products."""
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        _wait(device)
        started = time.perf_counter()
        one @ other
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
