"""A few steps of a training, timed part by part: what a micro-batch takes, what the optimizer takes, how much memory at most.

    step 0    isn't counted: first allocations, compilation
    step 1…   micro-batch | micro-batch | optimizer

Two micro-batches are enough to have the memory of a step of any number of them: gradients are there while activations are.
"""

import time
from dataclasses import dataclass

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from snaketune.models.device_memory import peak_memory
from snaketune.training.loop.throughput import ThroughputMeter
from snaketune.training.loop.trainer import BaseTrainer

# On one device as many steps as fit into these seconds, two at least; several count alike, each by its own clock.
# Of the tokens of the fullest micro-batch, the share from which another one counts as full.
FULL = 0.75
SECONDS, FEWEST_STEPS, MOST_STEPS = 2.0, 2, 20


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians in seconds, and the peak in bytes (on a GPU of what was allocated, else of the whole process).

    `reserved_bytes` is what torch's allocator has taken from a GPU for it, fragments included; elsewhere 0.

    Attributes:
        tokens: of documents, in micro-batches that are computed together, in the mean.
    """

    tokens: float
    micro_batch_s: float
    optimizer_s: float
    peak_bytes: int
    reserved_bytes: int = 0

    def step_s(self, accumulation: int) -> float:
        """Seconds of an optimizer step of so many micro-batches."""
        return accumulation * self.micro_batch_s + self.optimizer_s

    @classmethod
    def of_all(cls, timings: list["Timing"]) -> "Timing":
        """Of processes that wait for each other."""
        return cls(
            tokens=sum(one.tokens for one in timings),
            micro_batch_s=max(one.micro_batch_s for one in timings),
            optimizer_s=max(one.optimizer_s for one in timings),
            peak_bytes=max(one.peak_bytes for one in timings),
            reserved_bytes=max(one.reserved_bytes for one in timings),
        )


class Stopwatch(TrainerCallback):
    """Laps of the steps after the first one; ends the training when there are enough."""

    def __init__(self, meter: ThroughputMeter, alone: bool):
        self.meter, self.device, self.alone = meter, meter.device, alone
        # Seconds, and the tokens that the meter had counted by then.
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
        self.micro_batches.append((self._lap(), self._tokens()))

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.micro_batches.append((self._lap(), self._tokens()))

    def _tokens(self) -> int:
        before, self.counted = self.counted, int(self.meter.sums["tokens"])
        return self.counted - before

    def on_step_end(self, args, state, control, **_):
        self.optimizers.append(self._lap())
        done = state.global_step
        if done == 1:
            self.micro_batches, self.optimizers = [], []
        enough = self.alone and done > FEWEST_STEPS and self.last - self.started > SECONDS
        control.should_training_stop = enough or done > (MOST_STEPS if self.alone else FEWEST_STEPS)


def time_steps(trainer: BaseTrainer) -> Timing:
    """Train for some steps. The trainer, and its model, are of no use afterwards."""
    args, device = trainer.args, trainer.run.compute.device
    watch = Stopwatch(trainer.meter, alone=args.world_size == 1)
    args.max_steps, args.save_strategy, args.logging_strategy = MOST_STEPS + 1, "no", "no"
    args.logging_first_step = False
    args.gradient_accumulation_steps = min(args.gradient_accumulation_steps, 2)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    trainer.compile()
    trainer.train()
    # The last of an epoch may be smaller, and is faster.
    most = max(tokens for _, tokens in watch.micro_batches)
    full = [(seconds, tokens) for seconds, tokens in watch.micro_batches if tokens > FULL * most]
    return Timing(
        tokens=sum(tokens for _, tokens in full) / len(full),
        micro_batch_s=_median([seconds for seconds, _ in full]),
        optimizer_s=_median(watch.optimizers),
        peak_bytes=peak_memory(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
