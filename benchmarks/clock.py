"""A clock on the steps of a training.

A step lasts from the end of the step before it, so that what a trainer does besides computing (reading rows, collating,
logging) is in it.
"""

import sys
import time
from collections.abc import Callable
from typing import Any


def packed_counts(batch: dict[str, Any]) -> dict[str, int]:
    """Count the real tokens and the supervised ones of a collated batch, and of pairs also these."""
    placed = batch["segments"].layout
    pairs = len(placed.completions) // 2
    return {"tokens": placed.document_tokens, "supervised": len(batch["targets"])} | ({"pairs": pairs} if pairs else {})


class Clock:
    """Records when each step ended, what it computed, and how many graphs were compiled.

    Args:
        warm_up, steps: that aren't timed, and that are timed thereafter.
        device: a CUDA device is waited for at the begin and the end of what is timed.
    """

    def __init__(self, warm_up: int, steps: int, device: Any = None):
        self.warm_up, self.steps, self.device = warm_up, steps, device
        self.started = self.first_begin = time.perf_counter()
        self.ends: list[float] = []
        self.counts: list[dict[str, int]] = []
        self.graphs: list[int] = []

    def count(self, **counts: int) -> None:
        """Count a micro-batch of the current step."""
        if len(self.counts) == len(self.ends):
            self.counts.append(dict.fromkeys(counts, 0))
        self.counts[-1] = {name: self.counts[-1][name] + count for name, count in counts.items()}

    def step_ended(self) -> bool:
        """Return whether this step was the last."""
        last = self.warm_up + self.steps
        if self.device and self.device.type == "cuda" and len(self.ends) + 1 in (1, self.warm_up, last):
            import torch

            torch.cuda.synchronize(self.device)
        self.ends.append(time.perf_counter())
        # Not imported for this: that takes a second.
        dynamo = sys.modules.get("torch._dynamo.utils")
        self.graphs.append(dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)
        return len(self.ends) >= last

    def timing(self, trainer: type, counts: Callable[[dict[str, Any]], dict[str, int]]) -> type:
        """Return a subclass of a transformers Trainer that stops after the last timed step. Args: counts: of a micro-batch."""
        from transformers import TrainerCallback

        clock = self

        class Timed(trainer):
            def __init__(self, **arguments):
                super().__init__(**arguments)
                self.add_callback(Ticks())

            def training_step(self, model, inputs, *others):
                clock.count(**counts(inputs))
                return super().training_step(model, inputs, *others)

        class Ticks(TrainerCallback):
            def on_step_begin(self, args, state, control, **_):
                if not clock.ends:
                    clock.first_begin = time.perf_counter()

            def on_step_end(self, args, state, control, **_):
                control.should_training_stop |= clock.step_ended()

        return Timed

    def found(self) -> dict[str, Any]:
        timed = self.counts[self.warm_up :]
        sums = {name: sum(step[name] for step in timed) for name in timed[0]}
        begin = self.ends[self.warm_up - 1] if self.warm_up else self.first_begin
        seconds = self.ends[-1] - begin
        return sums | {
            "steps": len(timed),
            "seconds": seconds,
            **{f"{name}_per_s": count / seconds for name, count in sums.items()},
            "step_s": seconds / len(timed),
            "first_step_s": self.ends[0] - self.started,
            # 0, where shapes are static.
            "graphs_compiled_after_warm_up": self.graphs[-1] - self.graphs[max(self.warm_up, 1) - 1],
        }
