"""Time a few steps of a training: seconds per micro-batch and per optimizer step, and peak memory.

    step 0    not counted: first allocations, compilation
    step 1…   micro-batch | micro-batch | optimizer

With two micro-batches, gradients and activations are in memory at the same time, so the peak is that of any larger number.
"""

import time
from dataclasses import dataclass
from statistics import median_high

import torch
from transformers import TrainerCallback

from snaketune.models.machine import peak_memory
from snaketune.training.autotune.time_limit import MAX_STEPS, MIN_STEPS, SECONDS
from snaketune.training.loop.throughput import ThroughputMeter
from snaketune.training.loop.trainer import BaseTrainer

# Micro-batches with at least this share of the fullest one's tokens count as full.
FULL_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Results of a trial: mean non-padding tokens of the full micro-batches, summed over processes; median seconds of a
    micro-batch and of the optimizer step; peak memory (on a GPU what torch allocated, elsewhere the resident memory of
    the process), and what torch's caching allocator reserved on a GPU, fragmentation included."""

    tokens: float
    micro_batch_s: float
    optimizer_s: float
    peak_bytes: int
    reserved_bytes: int = 0

    def step_s(self, accumulation: int) -> float:
        """Seconds of an optimizer step with `accumulation` micro-batches."""
        return accumulation * self.micro_batch_s + self.optimizer_s

    @classmethod
    def across_processes(cls, timings: list["Timing"]) -> "Timing":
        """Combine the timings of all processes, which wait for the slowest one."""
        slowest = {name: max(getattr(one, name) for one in timings) for name in vars(timings[0])}
        return cls(**slowest | {"tokens": sum(one.tokens for one in timings)})


class Stopwatch(TrainerCallback):
    """Times the steps after the first one, and ends the training after enough of them."""

    def __init__(self, meter: ThroughputMeter, alone: bool):
        self.meter, self.device, self.alone = meter, meter.device, alone
        # Seconds and tokens of each micro-batch.
        self.micro_batches: list[tuple[float, int]] = []
        self.optimizers: list[float] = []
        self.last = self.started = 0.0
        self.counted = 0

    def _lap(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.monotonic()
        lap, self.last = now - self.last, now
        return lap

    def on_step_begin(self, args, state, control, **_):
        self._lap()
        if state.global_step == 1:
            self.started = self.last

    def on_substep_end(self, args, state, control, **_):
        lap, before = self._lap(), self.counted
        self.counted = self.meter.sums["tokens"]
        self.micro_batches.append((lap, self.counted - before))

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args, state, control, **_):
        self.optimizers.append(self._lap())
        done = state.global_step
        if done == 1:
            self.micro_batches, self.optimizers = [], []
        enough = self.alone and done > MIN_STEPS and self.last - self.started > SECONDS
        control.should_training_stop = enough or done > (MAX_STEPS if self.alone else MIN_STEPS)


def time_steps(trainer: BaseTrainer) -> Timing:
    """Train for some steps and time them. The trainer and its model can't be used afterwards."""
    args, device = trainer.args, trainer.run.compute.device
    watch = Stopwatch(trainer.meter, alone=args.world_size == 1)
    args.max_steps, args.save_strategy, args.logging_strategy = MAX_STEPS + 1, "no", "no"
    args.logging_first_step = False
    args.gradient_accumulation_steps = min(args.gradient_accumulation_steps, 2)
    trainer.add_callback(watch)
    trainer.compile()
    trainer.train()
    # The last micro-batch of an epoch may be smaller, and therefore faster.
    most = max(tokens for _, tokens in watch.micro_batches)
    seconds, tokens = zip(*[one for one in watch.micro_batches if one[1] > FULL_SHARE * most])
    return Timing(
        tokens=sum(tokens) / len(tokens),
        micro_batch_s=median_high(seconds),
        optimizer_s=median_high(watch.optimizers),
        peak_bytes=peak_memory(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    )
