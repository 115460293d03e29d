"""The time of a training's steps by parts, from torch.profiler: products, attention, optimizer, copies, the rest, waiting."""

from collections.abc import Iterable
from typing import Any

import torch

PROFILED_STEPS = 2
# Parts by the names of operators and of the kernels of torch, cuBLAS, CUTLASS, cuDNN and NCCL; the first match counts. A fused
# pointwise kernel is named after everything in it; the loss has a softmax too.
WORDS = {
    "other": "triton_poi triton_red triton_per cpp_fused log_softmax logsoftmax",
    "attention": "attention flash fmha sdpa varlen softmax",
    "optimizer": "adam optimizer foreach multi_tensor sgd lion adafactor",
    "products": "::mm _mm addmm bmm matmul gemm linear cutlass cublas nvjet xmma triton_tem",
    "communication": "nccl gloo allreduce allgather reducescatter c10d::",
    "copies": "copy memcpy memset cat index gather scatter contiguous clone",
}
PARTS = {part: tuple(words.split()) for part, words in WORDS.items()}
REST, WAITING = "other", "waiting"


def profiler_of(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def shares_of_parts(profiler: torch.profiler.profile, device: torch.device, step_seconds: float) -> dict[str, float]:
    """The share of each part in PROFILED_STEPS steps; empty without events.

    On a GPU this is the time in its kernels, of `step_seconds` without profiling, which delays their launch. On a CPU it is the
    time of operators themselves in the computing thread, of the profiled steps, as profiling slows operators down. Waiting is
    the remaining time: for data, for Python, for kernel launches.
    """
    on_gpu = device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA
    # A GPU's timeline also has ranges that code marks, above the kernels within them.
    events = [
        event
        for event in profiler.events()
        if (event.device_type == kind) == on_gpu and not (on_gpu and event.is_user_annotation)
    ]
    if not events:
        return {}
    if on_gpu:
        timed = [(event.name, event.time_range.elapsed_us()) for event in events]
        return shares_by_part(timed, 1e6 * PROFILED_STEPS * step_seconds)
    whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return shares_by_part([(event.name, event.self_cpu_time_total) for event in events], whole)


def shares_by_part(timed: Iterable[tuple[str, float]], whole: float) -> dict[str, float]:
    """Return the share of each part in a total time.

    >>> shares_by_part([("aten::mm", 60.0), ("aten::add", 10.0), ("Optimizer.step#AdamW.step", 5.0)], 100.0)
    {'other': 0.1, 'attention': 0.0, 'optimizer': 0.05, 'products': 0.6, 'communication': 0.0, 'copies': 0.0, 'waiting': 0.25}
    """
    shares: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    for name, time in timed:
        low = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in low for word in words)), REST)
        shares[part] += time
    shares = {part: round(min(1.0, time / whole), 4) for part, time in shares.items()}
    return shares | {WAITING: round(max(0.0, 1 - sum(shares.values())), 4)}
