"""Where the time of a training's steps goes, by torch.profiler: products, attention, optimizer, copies, the rest, waiting."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from snaketune.training.launched import is_first_process

PROFILED_STEPS = 2
# By what kernels and operators are called; the first that fits.
PARTS = {
    "attention": ("attention", "flash", "fmha", "varlen", "softmax"),
    "optimizer": ("adam", "optimizer", "foreach", "_fused", "sgd", "lion", "adafactor"),
    "products": ("mm", "matmul", "gemm", "linear", "cutlass", "cublas", "bmm", "xmma", "wgmma"),
    "copies": ("copy", "memcpy", "memset", "cat", "index", "gather", "scatter", "to_copy", "contiguous", "clone"),
}
REST, WAITING = "other", "waiting"


class Profiled(TrainerCallback):
    """Takes the steps after a certain one apart, and ends the training."""

    def __init__(self, after: int, device: torch.device, trace: Path):
        self.after, self.device, self.trace = after, device, trace
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.seconds = 0.0
        self.shares: dict[str, float] = {}

    def on_step_begin(self, args, state, control, **_):
        """Of the Trainer: a step begins."""
        if state.global_step == self.after:
            self.profiler.start()

    def on_step_end(self, args, state, control, **_):
        """Of the Trainer: a step is done."""
        if state.global_step == self.after + PROFILED_STEPS:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            self.profiler.stop()
            if is_first_process():
                self.profiler.export_chrome_trace(str(self.trace))
            self.shares = shares(self.profiler, self.device)
            control.should_training_stop = True


def shares(profiler: torch.profiler.profile, device: torch.device) -> dict[str, float]:
    """Of the time between the first event and the last, what each part took.

    On a GPU, time in its kernels; on a CPU, operators' own time in the thread that computes. Waiting is what is left: for data,
    for Python, for kernels to be started.
    """
    on_gpu = device.type == "cuda"
    timed = [
        (
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.self_device_time_total if on_gpu else event.self_cpu_time_total,
        )
        for event in profiler.events()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu
    ]
    if not timed:
        return {}
    whole = max(end for _, _, end, _ in timed) - min(start for _, start, _, _ in timed)
    return divided(((name, own) for name, _, _, own in timed), whole)


def divided(timed: Iterable[tuple[str, float]], whole: float) -> dict[str, float]:
    """Shares of a whole, by part.

    >>> divided([("aten::mm", 60.0), ("aten::add", 10.0), ("Optimizer.step#AdamW.step", 5.0)], 100.0)
    {'attention': 0.0, 'optimizer': 0.05, 'products': 0.6, 'copies': 0.0, 'other': 0.1, 'waiting': 0.25}
    """
    found: dict[str, Any] = dict.fromkeys([*PARTS, REST], 0.0)
    for name, own in timed:
        low = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in low for word in words)), REST)
        found[part] += own
    found = {part: round(min(1.0, own / whole), 4) for part, own in found.items()}
    return found | {WAITING: round(max(0.0, 1 - sum(found.values())), 4)}
