"""Time a few steps of a training: seconds per micro-batch and per optimizer step, and peak memory.

    step 0    not counted: first allocations, compilation
    step 1…   micro-batch | micro-batch | optimizer

With two micro-batches, gradients and activations are in memory at the same time, so the peak is that of any larger number.
"""

import time
from statistics import median_high

import torch
from transformers import TrainerCallback

from snaketune.engine.features import TrainingFeatures
from snaketune.engine.model.machine import peak_memory
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.training.autotune.search import MIN_STEPS
from snaketune.training.pipeline import take_steps

# A single process measures for SECONDS, at least MIN_STEPS steps. Several processes measure MIN_STEPS steps each: their clocks
# differ, but all must do equally many.
SECONDS, MAX_STEPS = 2.0, 20
# Micro-batches with at least this share of the fullest one's tokens count as full.
FULL_SHARE = 0.75


class Stopwatch(TrainerCallback):
    """Times the steps after the first one, and ends the training after enough of them."""

    def __init__(self, trainer: TrainingFeatures):
        self.meter, self.device = trainer.meter, trainer.compute.device
        self.alone = trainer.args.world_size == 1
        # Seconds and tokens of each micro-batch.
        self.micro_batches: list[tuple[float, int]] = []
        self.optimizers: list[float] = []
        self.last = self.started = 0.0
        self.counted = 0

    def _lap(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        before, self.last = self.last, time.monotonic()
        return self.last - before

    def on_step_begin(self, args, state, control, **_):
        self._lap()
        if state.global_step == 1:
            self.started = self.last

    def on_substep_end(self, args, state, control, **_):
        before, self.counted = self.counted, self.meter.sums["tokens"]
        self.micro_batches.append((self._lap(), self.counted - before))

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args, state, control, **_):
        self.optimizers.append(self._lap())
        done = state.global_step
        if done == 1:
            self.micro_batches, self.optimizers = [], []
        enough = self.alone and done > MIN_STEPS and self.last - self.started > SECONDS
        control.should_training_stop = enough or done > (MAX_STEPS if self.alone else MIN_STEPS)


def time_steps(trainer: TrainingFeatures, work: WorkFolder) -> dict[str, float]:
    """Train for some steps and time them; the trainer and its model can't be used afterwards.

    Returns: mean non-padding tokens of the full micro-batches of this process; median seconds of a micro-batch and of the
    optimizer step; peak memory (on a GPU what torch allocated, elsewhere the resident memory of the process).
    """
    args, watch = trainer.args, Stopwatch(trainer)
    args.max_steps, args.save_strategy, args.logging_strategy = MAX_STEPS + 1, "no", "no"
    args.logging_first_step = False
    args.gradient_accumulation_steps = min(args.gradient_accumulation_steps, 2)
    trainer.add_callback(watch)
    take_steps(trainer, work)
    # The last micro-batch of an epoch may be smaller, and therefore faster.
    most = max(tokens for _, tokens in watch.micro_batches)
    seconds, tokens = zip(*[lap for lap in watch.micro_batches if lap[1] > FULL_SHARE * most])
    return {
        "tokens": sum(tokens) / len(tokens),
        "micro_batch_s": median_high(seconds),
        "optimizer_s": median_high(watch.optimizers),
        "peak_bytes": peak_memory(watch.device),
    }
