"""Where the time of a training's steps goes, by torch.profiler: products, attention, optimizer, copies, the rest, waiting."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from snaketune.training.launch.worker import is_main_process

PROFILED_STEPS = 2
# By what operators, and the kernels of torch, cuBLAS, CUTLASS, cuDNN and NCCL, are called; the first that fits.
PARTS = {
    # Pointwise work that the compiler put together is called after all that is in it; the loss has a softmax too.
    "other": ("triton_poi", "triton_red", "triton_per", "cpp_fused", "log_softmax", "logsoftmax"),
    "attention": ("attention", "flash", "fmha", "sdpa", "varlen", "softmax"),
    "optimizer": ("adam", "optimizer", "foreach", "multi_tensor", "sgd", "lion", "adafactor"),
    "products": (
        "::mm",
        "_mm",
        "addmm",
        "bmm",
        "matmul",
        "gemm",
        "linear",
        "cutlass",
        "cublas",
        "nvjet",
        "xmma",
        "triton_tem",
    ),
    "communication": ("nccl", "gloo", "allreduce", "allgather", "reducescatter", "c10d::"),
    "copies": ("copy", "memcpy", "memset", "cat", "index", "gather", "scatter", "contiguous", "clone"),
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
        self.state: Literal["before", "running", "done"] = "before"

    def on_step_begin(self, args, state, control, **_):
        """Of the Trainer: a step begins."""
        if state.global_step == self.after:
            self.profiler.start()
            self.state = "running"

    def on_step_end(self, args, state, control, **_):
        """Of the Trainer: a step is done."""
        if self.state == "running" and state.global_step == self.after + PROFILED_STEPS:
            self._stop()
            self.state = "done"
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **_):
        """Of the Trainer: it may have had too few steps."""
        if self.state == "running":
            self._stop()

    def _stop(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.profiler.stop()
        if is_main_process():
            self.profiler.export_chrome_trace(str(self.trace))

    def shares(self, step_seconds: float) -> dict[str, float]:
        """Of a step, what each part took; nothing where too few were profiled.

        On a GPU, time in its kernels; on a CPU, operators' own time in the thread that computes. Waiting is what is left: for
        data, for Python, for kernels to be started.

        Args:
            step_seconds: of a step that isn't profiled. Beside the profiler kernels take as long as ever, but are started
                later; operators of a CPU take longer themselves, so that there the profiled steps are the whole.
        """
        if self.state != "done":
            return {}
        on_gpu = self.device.type == "cuda"
        events = [
            event
            for event in self.profiler.events()
            if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu
            # A GPU's time line has the ranges that code marks, too, above the kernels within them.
            and not (on_gpu and event.is_user_annotation)
        ]
        if not events:
            return {}
        if on_gpu:
            timed = ((event.name, event.time_range.elapsed_us()) for event in events)
            return divided(timed, 1e6 * PROFILED_STEPS * step_seconds)
        whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        return divided(((event.name, event.self_cpu_time_total) for event in events), whole)


def divided(timed: Iterable[tuple[str, float]], whole: float) -> dict[str, float]:
    """Shares of a whole, by part.

    >>> divided([("aten::mm", 60.0), ("aten::add", 10.0), ("Optimizer.step#AdamW.step", 5.0)], 100.0)
    {'other': 0.1, 'attention': 0.0, 'optimizer': 0.05, 'products': 0.6, 'communication': 0.0, 'copies': 0.0, 'waiting': 0.25}
    """
    found: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    for name, own in timed:
        low = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in low for word in words)), REST)
        found[part] += own
    found = {part: round(min(1.0, own / whole), 4) for part, own in found.items()}
    return found | {WAITING: round(max(0.0, 1 - sum(found.values())), 4)}
