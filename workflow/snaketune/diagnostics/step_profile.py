"""The time of a training's steps by parts, from torch.profiler: products, attention, optimizer, copies, the rest, waiting."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from snaketune.training.launch.worker import is_main_process

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


class StepProfiler(TrainerCallback):
    """Profiles the steps after a given one, and ends the training."""

    def __init__(self, after: int, device: torch.device, trace: Path):
        self.after, self.device, self.trace = after, device, trace
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.state: Literal["before", "running", "done"] = "before"

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.after:
            self.profiler.start()
            self.state = "running"

    def on_step_end(self, args, state, control, **_):
        """Stop the profiler and the training after enough steps."""
        if self.state == "running" and state.global_step == self.after + PROFILED_STEPS:
            self._stop()
            self.state = "done"
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **_):
        """Stop the profiler if the training had too few steps."""
        if self.state == "running":
            self._stop()

    def _stop(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.profiler.stop()
        if is_main_process():
            self.profiler.export_chrome_trace(str(self.trace))

    def shares(self, step_seconds: float) -> dict[str, float]:
        """Return the share of each part in a step; empty if too few steps were profiled.

        On a GPU this is the time in its kernels, of `step_seconds` without profiling, which delays their launch. On a CPU it
        is operators' own time in the computing thread, of the profiled steps, as profiling slows operators down. Waiting is
        the remaining time: for data, for Python, for kernel launches.
        """
        if self.state != "done":
            return {}
        on_gpu = self.device.type == "cuda"
        kind = torch.autograd.DeviceType.CUDA
        events = [event for event in self.profiler.events() if (event.device_type == kind) == on_gpu]
        if on_gpu:
            # A GPU's timeline also has ranges that code marks, above the kernels within them.
            kernels = [event for event in events if not event.is_user_annotation]
            timed = [(event.name, event.time_range.elapsed_us()) for event in kernels]
            return shares_by_part(timed, 1e6 * PROFILED_STEPS * step_seconds) if timed else {}
        if not events:
            return {}
        whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        return shares_by_part([(event.name, event.self_cpu_time_total) for event in events], whole)


def shares_by_part(timed: Iterable[tuple[str, float]], whole: float) -> dict[str, float]:
    """Return the share of each part in a total time.

    >>> shares_by_part([("aten::mm", 60.0), ("aten::add", 10.0), ("Optimizer.step#AdamW.step", 5.0)], 100.0)
    {'other': 0.1, 'attention': 0.0, 'optimizer': 0.05, 'products': 0.6, 'communication': 0.0, 'copies': 0.0, 'waiting': 0.25}
    """
    shares: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    for name, own in timed:
        low = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in low for word in words)), REST)
        shares[part] += own
    shares = {part: round(min(1.0, own / whole), 4) for part, own in shares.items()}
    return shares | {WAITING: round(max(0.0, 1 - sum(shares.values())), 4)}
