"""A training and its trainer, for any rows and for any Trainer of transformers or TRL.

The Trainer's loop, schedule, precision and distribution are used as they are. Added are the sample order, prefetch, checkpoints
without pickles, and throughput in every log line.
"""

import math
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback

from snaketune.config.operation import Execution
from snaketune.engine.average import AveragedWeights
from snaketune.engine.checkpoints import CheckpointMixin, diverged
from snaketune.engine.fsdp import ShardedModelMixin, world_size
from snaketune.engine.held_out import HeldOutMixin
from snaketune.engine.log_lines import LogLinesMixin
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.machine import is_out_of_memory
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.model.passed_test import PassedTest
from snaketune.engine.optimizers import OptimizerMixin
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.preemption import PreemptionCallback
from snaketune.engine.prefetch import PrefetchMixin
from snaketune.engine.sample_order import SampleOrderMixin
from snaketune.engine.throughput import ThroughputMeter, log_line, time_left
from snaketune.models.adapter_stack import AdapterStack
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.tracking.curves import TrackedRun
from snaketune.training.autotune.batch_plan import IN_STEPS, record_out_of_memory
from snaketune.training.passed_tests import record_of_test

OFFLOADING_DEVICES = ("cuda", "xpu")
# A training that is silent for longer looks like one that hangs.
SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training is, and how it runs.

    Attributes:
        operation: with every `auto` resolved.
        adapter: folder of the adapter that is trained further; None if there is none.
    """

    spec: SftSpec | DpoSpec
    operation: Execution
    work: WorkFolder
    compute: Compute
    tracked: TrackedRun | None = None
    adapter: Path | None = None

    @classmethod
    def of(
        cls, spec: SftSpec | DpoSpec, operation: Execution, work: WorkFolder, tracked: TrackedRun | None = None
    ) -> Self:
        """Return a run on the device and precision that this process has."""
        compute = resolve_compute(spec.training.precision, training=True)
        return cls(spec=spec, operation=operation, work=work, compute=compute, tracked=tracked)

    @property
    def offloads(self) -> bool:
        """Whether activations are moved to host memory: from devices with memory of their own, if the config asks for it."""
        return self.operation.activation_offloading and self.compute.device.type in OFFLOADING_DEVICES

    @property
    def in_shards(self) -> bool:
        """Whether the model is sharded over the processes by FSDP."""
        return self.operation.launch == "fsdp" and world_size() > 1

    @property
    def record(self) -> PassedTest | None:
        """The record of the self-test with the kernel of `compute`; see `passed_tests.record_of_test`."""
        return record_of_test(self.spec, self.work, self.compute)

    @property
    def has_passed(self) -> bool:
        """Whether an earlier training has passed that self-test, so that its kernel needs no other check."""
        return self.record is not None and self.record.share() is not None

    @property
    def checkpoints(self) -> Path:
        return self.work.state / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A training with its rows and its initial model, before that is loaded; all that `pipeline` needs.

    Attributes:
        rows: training rows, as the trainer takes them; `str(rows)` describes them in the log.
        held_out: rows that may be measured while the training runs; None if it can't measure any.
    """

    trainer_class: "type[BaseTrainer]"
    rows: Sized
    run: TrainingRun
    initial: AdapterStack
    held_out: PackedRows | None = None

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """The config of the initial model; None for a model from scratch."""
        return self.initial.config()

    @property
    def any_config(self) -> PretrainedConfig | None:
        """The config of the initial model, also if that is made from scratch."""
        return self.config or self.initial.new_config()

    def with_kernel(self) -> Self:
        """Return the training with the kernel for its model and packed rows; see `packing_support.choose_kernel`."""
        if self.run.has_passed:
            return self
        longest, prefixes, dropout = self.rows.longest[0], self.rows.has_prefixes, self.trainer_class.drops_out
        compute = choose_kernel(self.run.compute, self.any_config, longest, prefixes=prefixes, dropout=dropout)
        return replace(self, run=replace(self.run, compute=compute))


class BaseTrainer(
    HeldOutMixin,
    PrefetchMixin,
    SampleOrderMixin,
    ShardedModelMixin,
    LogLinesMixin,
    CheckpointMixin,
    OptimizerMixin,
    TrainerCallback,
):
    """Mixin for transformers' Trainer: the features of every training, and the hooks that `pipeline` calls.

    It is the first of its callbacks, so that the others find a checkpoint complete when it is saved.
    """

    # Whether the model's dropout is active in training.
    drops_out = True
    # Whether the loss is a sum over the batch, so that the chunked head can compute gradients in the forward pass.
    sums_losses = True
    compiled = False
    # Facts about the model for manifest and run.json, and the number of its parameters, and of those that are trained.
    checked: Outcome
    parameters: int
    trainable: int
    # None in trainings that aren't continued elsewhere: trials of speed.
    preemption: PreemptionCallback | None = None

    def __init__(self, *, run: TrainingRun, rows: Any, **arguments: Any):
        self.run, self.rows = run, rows
        super().__init__(**arguments)
        self.meter = ThroughputMeter(self.model, run.compute, self.args.world_size)
        self.remove_callback(PrinterCallback)
        self.add_callback(self)

    @staticmethod
    def check_model(
        model: PreTrainedModel, rows: Any, compute: Compute, record: PassedTest | None
    ) -> tuple[Outcome, Compute]:
        """Check the loaded model, usually before adapters are added; return facts for manifest and run.json, and the kernel.

        Args:
            record: of a passed test, which isn't repeated.
        Raises:
            SnaketuneError: the model can't be trained on these rows.
        """
        raise TypeError("a subclass defines this")

    def initialize_adapters(self) -> None:
        """Set initial values of adapters that depend on the rows; called before `check_start`, not on resume."""

    def check_start(self) -> None:
        """Raise SnaketuneError if training can't start from this model; called before step 1, not on resume."""

    def compile(self) -> None:
        """Compile the model if configured, or if `auto` expects a gain; called before the first step of this process."""

    def counts(self) -> dict[str, int]:
        """Counts for the manifest: rows, and document tokens of all steps."""
        return {"rows": len(self.rows), "tokens": self.state.num_input_tokens_seen}

    def conclusions(self) -> Outcome:
        """Facts for manifest and run.json; called after the last step."""
        return Outcome()

    @property
    def gather_processes(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Gathers a tensor of all processes along its first dimension; None for a single process."""
        return self.accelerator.gather if self.args.world_size > 1 else None

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train; record the step if memory runs out, and stop the prefetch thread in any case."""
        (self.run.work.state / IN_STEPS).touch()
        if average := self.run.spec.training.average:
            # After the adapters are initialized, by which their weights may become others.
            self.average = AveragedWeights(self.model, average.ema)
            self.add_callback(self.average)
        try:
            return super().train(*arguments, **keywords)
        except Exception as error:
            if is_out_of_memory(error):
                record_out_of_memory(self.run.work.state, self.state.global_step + 1, error)
            raise
        finally:
            self.stop_prefetch()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches = self.meter.batches(self.prefetched(epoch_iterator, device))
        return super().get_batch_samples(batches, num_batches, device)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.run.work.check_held()
        super()._save_checkpoint(*arguments, **keywords)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # The meter counts them, and the Trainer would iterate over all parameters for every batch.
        return 0


class EndOfSnapshot(TrainerCallback):
    """Ends a training after this share of its steps, rounded up, with a checkpoint from which the whole run resumes."""

    def __init__(self, until: float):
        self.until = until

    def on_train_begin(self, args, state, control, **_):
        """End at once if the checkpoint that is resumed from is that of the end."""
        control.should_training_stop |= self._ended(state)

    def on_step_end(self, args, state, control, **_):
        if self._ended(state):
            control.should_save = control.should_training_stop = True

    def _ended(self, state) -> bool:
        return state.global_step >= math.ceil(state.max_steps * self.until)


class LogCallback(TrainerCallback):
    """Prints a line per log step, others where steps are slow, and stops a training whose launcher has died."""

    def __init__(self):
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
        print(line if remaining is None else f"{line}  {time_left(remaining)} left", flush=True)
        self.printed = time.monotonic()

    def _remaining_s(self, state: TrainerState) -> float | None:
        """Return the estimated seconds to the end; None before the second step of this process has ended."""
        first, since = self.warm or (state.global_step, 0.0)
        done, to_do = state.global_step - first, state.max_steps - state.global_step
        return (time.monotonic() - since) / done * to_do if done else None
