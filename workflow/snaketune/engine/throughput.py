"""The log of a training, and its throughput: tokens (without padding), FLOPs and memory between two lines, and waits for data.

The clock runs from the step's request for batches until the loss is read for the log, which synchronizes with the device; it
is paused while a checkpoint is written. The first line of a process includes one-time work (compilation, first allocations), so
it says `warming up` and is excluded from the medians.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState

from snaketune.engine.checkpoints import diverged
from snaketune.engine.model.device_speed import peak_of
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.flops import count_flops
from snaketune.engine.model.machine import peak_memory

# What is counted from one log line to the next.
COUNTED = ("tokens", "supervised", "flops", "computed")
SHOWN = ("loss", "accuracy", "margin", "grad_norm", "learning_rate")
GB = 1e9
# A training that is silent for longer looks like one that hangs.
SECONDS_BETWEEN_LINES = 30.0


class ThroughputMeter:
    """Counts tokens, FLOPs and time of one process; `read` sums them over all processes."""

    def __init__(self, model: torch.nn.Module, compute: Compute, processes: int):
        self.flops, self.peak, self.device = count_flops(model), peak_of(compute), compute.device
        self.processes = processes
        # Peak FLOP/s of all devices, which may be of different models: exact once the first line is read.
        self.total_peak = self.peak.flops_per_second * processes
        self.running_since: float | None = None
        self.waited_for_first_batch: float | None = None
        # Since the last line: tokens, supervised ones, FLOPs, and FLOPs less the head's of tokens that it doesn't project.
        self.sums: Counter[str] = Counter()
        self.seconds = self.waited = 0.0
        self.lines = self.steps = 0
        # Peak bytes of each process, by rank.
        self.memory: tuple[float, ...] = ()

    def __str__(self) -> str:
        """The definition of MFU in this training, for the log."""
        peak = self.peak.flops_per_second
        of = f"{peak / 1e12:,.4g} TFLOP/s" if peak >= 1e12 else f"{peak / 1e9:,.3g} GFLOP/s"
        each = f" on each of {self.processes} GPUs" if self.processes > 1 else ""
        return f"MFU: {self.flops} over what is visible, of {of}{each} ({self.peak.source})"

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Start a step: yield its batches, and measure the time spent waiting for them."""
        if self.running_since is None:
            self.running_since = time.monotonic()
        self.steps += 1
        while True:
            asked = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited = time.monotonic() - asked
            if self.waited_for_first_batch is None:
                self.waited_for_first_batch = waited
            else:
                self.waited += waited
            yield batch

    def count(self, prefixes_D: np.ndarray, lengths_D: np.ndarray, *, supervised: int, projected: int) -> None:
        """Count a batch of D documents: their prefixes and lengths, supervised tokens, and those that the head projects."""
        tokens, flops = int(lengths_D.sum()), self.flops.batch(prefixes_D, lengths_D)
        computed = self.flops.computed(flops, tokens, projected)
        self.sums.update(tokens=tokens, supervised=supervised, flops=flops, computed=computed)

    def stop(self) -> None:
        """Stop the clock once the device is idle; the next step starts it again."""
        if self.running_since is not None:
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            self.seconds += time.monotonic() - self.running_since
            self.running_since = None

    def unlogged(self) -> list[float]:
        """What this process has counted since the last line, for a checkpoint: COUNTED, and the seconds."""
        return [*(float(self.sums[name]) for name in COUNTED), self.seconds]

    def restore(self, unlogged: list[float]) -> None:
        """Restore what `unlogged` returned."""
        *counts, self.seconds = unlogged
        self.sums = Counter(dict(zip(COUNTED, counts, strict=True)))

    def read(self, gather: Any = None) -> dict[str, float]:
        """Return the metrics that are added to the Trainer's log line, over all processes, and reset the counts.

        Args:
            gather: returns float64[processes, n], given float64[1, n] in each process; None for a single process.
        """
        self.stop()
        if not self.sums:
            return {}
        own = [*self.unlogged(), float(peak_memory(self.device)), self.peak.flops_per_second]
        rows = [own]
        if gather is not None:
            rows = gather(torch.tensor(rows, dtype=torch.float64, device=self.device)).tolist()
        *columns, seconds, self.memory, peaks = zip(*rows)
        sums, slowest, self.total_peak = dict(zip(COUNTED, map(sum, columns))), max(seconds), sum(peaks)
        self.sums, self.seconds, self.lines = Counter(), 0.0, self.lines + 1
        return {
            "tokens": sums["tokens"],
            "tokens_per_second": round(sums["tokens"] / slowest, 1),
            "supervised_tokens_per_second": round(sums["supervised"] / slowest, 1),
            "mfu": round(sums["flops"] / slowest / self.total_peak, 7),
            "mfu_computed": round(sums["computed"] / slowest / self.total_peak, 7),
            "memory_gb": round(max(self.memory) / GB, 3),
            **({"warming_up": True} if self.lines == 1 else {}),
        }

    def about(self, history: list[dict[str, float]]) -> dict[str, Any]:
        """Facts for run.json: medians over the log lines, how MFU is counted, peak memory, this process's wait for data.

        `mfu` counts the head for every token, `mfu_computed` only for tokens that it projects; `mfu_plain_median` is the
        usual estimate from the number of parameters, without attention.
        """
        timed = [entry for entry in history if "mfu" in entry]
        settled = [entry for entry in timed if not entry.get("warming_up")] or timed
        names = ("tokens_per_second", "supervised_tokens_per_second", "mfu", "mfu_computed")
        # The median is a logged value, not the mean of two.
        medians = {f"{name}_median": sorted(entry[name] for entry in settled)[len(settled) // 2] for name in names}
        on_cuda, per_token = self.device.type == "cuda", self.flops.per_parameter * self.flops.parameters
        reserved = torch.cuda.max_memory_reserved(self.device) if on_cuda else 0
        return medians | {
            "mfu_plain_median": round(medians["tokens_per_second_median"] * per_token / self.total_peak, 7),
            "flops": self.flops.about(),
            "flops_per_parameter_and_token": self.flops.per_parameter,
            "model_tflops_per_second": round(medians["mfu_median"] * self.total_peak / 1e12, 4),
            "peak_flops_per_second": self.peak.flops_per_second,
            "peak_flops_source": self.peak.source,
            "peak_memory_gb": max(entry["memory_gb"] for entry in timed),
            **(
                {"peak_memory_gb_of_processes": [round(one / GB, 3) for one in self.memory]}
                if self.processes > 1
                else {}
            ),
            "peak_memory_is": "allocated on the GPU" if on_cuda else "resident in the process",
            **({"peak_memory_reserved_gb": round(reserved / GB, 3)} if on_cuda else {}),
            "steps_of_this_process": self.steps,
            "waited_for_data_s": round(self.waited, 4),
            "waited_for_first_batch_s": round(self.waited_for_first_batch or 0.0, 4),
        }


def log_line(logs: dict[str, float], step: int, steps: int) -> str:
    """Format one line of the log.

    >>> log_line({"loss": 3.2149, "learning_rate": 3e-4, "tokens_per_second": 2600.4, "supervised_tokens_per_second": 1590.0,
    ...       "mfu": 0.5213, "memory_gb": 0.914}, 20, 830)
    'step 20/830  loss 3.215  learning rate 0.0003  2,600 tokens/s (1,590 supervised)  MFU 52%  0.91 GB'
    """
    facts = [f"{name.replace('_', ' ')} {float(logs[name]):.4g}" for name in SHOWN if name in logs]
    if "tokens_per_second" in logs:
        supervised = f" ({logs['supervised_tokens_per_second']:,.0f} supervised)"
        # Beside other work, a CPU's measured peak may be lower than what a training reaches.
        share = f"{100 * logs['mfu']:.2g}" if logs["mfu"] < 0.995 else f"{100 * logs['mfu']:.0f}"
        facts += [f"{logs['tokens_per_second']:,.0f} tokens/s{supervised}", f"MFU {share}%"]
        facts.append(f"{logs['memory_gb']:.2f} GB")
    facts += ["warming up"] if logs.get("warming_up") else []
    return "  ".join([f"step {step}/{steps}", *facts])


def time_left(seconds: float) -> str:
    """
    >>> [time_left(seconds) for seconds in (8.2, 100, 754, 9000)]
    ['8 s', '100 s', '13 min', '2 h 30 min']
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class LogCallback(TrainerCallback):
    """Prints a line per log step, others where steps are slow, and stops a training whose launcher has died."""

    def __init__(self, prefix: str = ""):
        """Args: prefix: of each line."""
        self.prefix = prefix
        # Number and end time of this process's first step, which is slower than the others.
        self.warm: tuple[int, float] | None = None
        self.printed = time.monotonic()

    def on_train_begin(self, args, state, control, **_):
        """Set save and log intervals from the arguments: on resume the Trainer takes them from the checkpoint's state."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args, state, control, **_):
        if self.warm is None:
            self.warm = state.global_step, time.monotonic()
        # The last step has a line. Preemption, which comes after this, adds none: the training goes on later.
        control.should_log |= control.should_training_stop
        self.on_substep_end(args, state, control)

    def on_substep_end(self, args, state, control, **_):
        """Print the steps done after SECONDS_BETWEEN_LINES without a log line, which many slow steps may be apart."""
        if time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES and not control.should_log:
            self._print(f"{state.global_step} of {state.max_steps} steps done", self._remaining_s(state))

    def on_prediction_step(self, args, state, control, **_):
        """Say so while a measurement of held-out rows takes long."""
        if time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
            self._print(f"measuring held-out rows after step {state.global_step}", None)

    def on_log(self, args, state, control, logs=None, **_):
        """Print the log line with the estimated time to the end; raise SnaketuneError if the loss isn't finite."""
        if not logs or "loss" not in logs:
            return
        if not all(math.isfinite(logs[name]) for name in ("loss", "grad_norm") if name in logs):
            raise diverged(state.global_step, f"loss {logs['loss']}, grad_norm {logs.get('grad_norm')}")
        self._print(log_line(logs, state.global_step, state.max_steps), self._remaining_s(state))

    def _print(self, line: str, remaining: float | None) -> None:
        left = "" if remaining is None else f"  {time_left(remaining)} left"
        print(f"{self.prefix}{line}{left}", flush=True)
        self.printed = time.monotonic()

    def _remaining_s(self, state: TrainerState) -> float | None:
        """Return the estimated seconds to the end; None before the second step of this process has ended."""
        first, since = self.warm or (state.global_step, 0.0)
        done, to_do = state.global_step - first, state.max_steps - state.global_step
        return (time.monotonic() - since) / done * to_do if done else None
