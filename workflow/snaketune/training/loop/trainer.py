"""What every training has, whatever its rows are and whichever trainer of transformers runs it.

The trainer keeps its loop, schedule, precision and distribution. This adds the order of the rows, batches that are ready
before they are asked for, checkpoints without pickles, and a line of the log that says how fast it goes.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainerCallback, TrainingArguments

from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.models.device_memory import is_out_of_memory
from snaketune.models.devices import Compute, resolve_compute
from snaketune.models.packing_support import with_supported_kernel
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.tracking.curves import Tracked
from snaketune.training.autotune.batch_plan import record_out_of_memory
from snaketune.training.checkpoint.checkpoints import SafeCheckpoints, diverged
from snaketune.training.launch.worker import parent_is_gone
from snaketune.training.loop.prefetch import TakesAhead
from snaketune.training.loop.sample_order import OwnOrder
from snaketune.training.loop.step_arguments import step_arguments
from snaketune.training.loop.throughput import Gauge, line
from snaketune.training.parallel.fsdp import KeepsShards, processes


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: what it is told, how it runs (numbers in the place of `auto`), where it works, computes, is drawn."""

    spec: SftSpec | DpoSpec
    operation: Execution
    work: WorkFolder
    compute: Compute
    tracked: Tracked | None = None
    # Of one that is trained further, its folder.
    adapter: Path | None = None

    @classmethod
    def of(
        cls, spec: SftSpec | DpoSpec, operation: Execution, work: WorkFolder, tracked: Tracked | None = None
    ) -> "Run":
        """With what this process can compute with."""
        compute = resolve_compute(spec.training.precision)
        return cls(spec=spec, operation=operation, work=work, compute=compute, tracked=tracked)

    def suited(self, config: PretrainedConfig | None, *, dropout: bool) -> "Run":
        """With an attention kernel that can compute a model; see `models.packable.with_supported_kernel`."""
        return replace(self, compute=with_supported_kernel(self.compute, config, dropout=dropout))

    @property
    def in_shards(self) -> bool:
        """Whether each process is to hold a share of the model and no more."""
        return self.operation.launch == "fsdp" and processes() > 1

    @property
    def checkpoints(self) -> Path:
        return self.work.state / "checkpoints"


class BaseTrainer(TakesAhead, OwnOrder, KeepsShards, SafeCheckpoints):
    """Mixed into a transformers Trainer: what every training has, and what the pipeline asks of each kind."""

    # Whether the model's own dropout works in training.
    drops_out = True
    # Whether the loss is one sum over a batch, of which the head makes gradients on the way.
    sums_losses = True
    compiled = False

    def __init__(self, *, run: Run, rows: Any, **arguments: Any):
        self.run, self.rows = run, rows
        super().__init__(**arguments)
        self.gauge = Gauge(self.model, run.compute, self.args.world_size)

    @staticmethod
    def check_config(config: PretrainedConfig, rows: Any, compute: Compute) -> None:
        """Called before weights are loaded; raises SnaketuneError if such a model can't be trained on these rows."""

    @staticmethod
    def check_model(model: PreTrainedModel, rows: Any, compute: Compute) -> tuple[dict[str, Any], dict[str, Any]]:
        """Called before adapters are added; raises as `check_config` does. Facts for the manifest, and for run.json."""
        raise TypeError("a subclass defines this")

    def check_start(self) -> None:
        """Called before the first step of a training, not of a resumed one; raises SnaketuneError if it can't begin so."""

    def compile(self) -> None:
        """Called before the first step of this process: compiles the model where that is asked for, or pays."""

    def counts(self) -> dict[str, int]:
        """For the manifest: rows, and tokens of the documents of all steps that were done."""
        return {"rows": len(self.rows), "tokens": self.state.num_input_tokens_seen}

    def conclusions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Called when the training is done: facts for the manifest, and for run.json."""
        return {}, {}

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """However it ends, nobody makes batches any more; if for want of memory, it is told in which step."""
        try:
            return super().train(*arguments, **keywords)
        except Exception as error:
            if is_out_of_memory(error):
                record_out_of_memory(self.run.work.state, self.state.global_step + 1, error)
            raise
        finally:
            self.stop_ahead()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The Trainer's hook at the beginning of a step."""
        batches = self.gauge.batches(self.taken_ahead(epoch_iterator, device))
        return super().get_batch_samples(batches, num_batches, device)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.gauge.stop()
        self.run.work.check_held()
        super()._save_checkpoint(*arguments, **keywords)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The gauge counts them; the Trainer would go through all parameters at every batch."""
        return 0

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Add throughput and the gauge's means to the Trainer's own line."""
        if "loss" in logs:
            logs |= self.gauge.read(self.accelerator.gather if self.args.world_size > 1 else None)
            # A part of checkpoints, each of which has a line of the log, so that a resumed training counts every step once.
            self.state.num_input_tokens_seen += int(logs.pop("tokens", 0))
        super().log(logs, *arguments, **keywords)


class Watch(TrainerCallback):
    """Prints a line per log step, and stops a training that nobody waits for."""

    def __init__(self):
        # When the first step of this process was done, and which: it takes longer than the others.
        self.warm: tuple[int, float] | None = None

    def on_train_begin(self, args, state, control, **_):
        """Save and log as often as the arguments say: the Trainer goes by its state, and a resumed one has its checkpoint's."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args, state, control, **_):
        """A requeued job may already wait for this folder."""
        if parent_is_gone():
            raise SnaketuneError("the job that started this training is gone; stopping")
        if self.warm is None:
            self.warm = state.global_step, time.monotonic()
        # A line is a mean over the steps since the one before it, and a resumed training knows only those after its checkpoint.
        control.should_log |= control.should_save

    def on_log(self, args, state, control, logs=None, **_):
        """One line: where it is, how it goes, how long it takes."""
        if not logs or "loss" not in logs:
            return
        if not all(math.isfinite(logs[name]) for name in ("loss", "grad_norm") if name in logs):
            raise diverged(state.global_step, f"loss {logs['loss']}, grad_norm {logs.get('grad_norm')}")
        if not state.is_world_process_zero:
            return
        first, since = self.warm
        done, to_do = state.global_step - first, state.max_steps - state.global_step
        left = (time.monotonic() - since) / done * to_do if done else None
        print(line(logs, state.global_step, state.max_steps, left), flush=True)


def training_arguments(run: Run, items: int) -> TrainingArguments:
    """The Trainer's arguments.

    Args:
        items: of an epoch.
    Raises:
        SnaketuneError: as `step_arguments` raises.
    """
    training, operation = run.spec.training, run.operation
    world, on_cpu = processes(), run.compute.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(run.checkpoints),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=operation.micro_batch_rows,
        gradient_accumulation_steps=training.batch_rows // (operation.micro_batch_rows * world),
        **step_arguments(training, items, run.compute.device),
        max_grad_norm=training.max_grad_norm,
        gradient_checkpointing=operation.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if operation.gradient_checkpointing else None,
        bf16=run.compute.dtype == torch.bfloat16,
        # Told to use the CPU, accelerate would leave DeepSpeed out and not say so; told of gloo, it doesn't.
        use_cpu=on_cpu and operation.launch != "deepspeed",
        ddp_backend="gloo" if on_cpu and operation.launch == "deepspeed" else None,
        seed=training.seed,
        logging_steps=operation.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=operation.checkpoint_steps,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        # EpochPermutation fills up; accelerate would take rows from the epoch's beginning again.
        accelerator_config={"even_batches": False, "use_seedable_sampler": False},
        # training.loop.prefetch has a thread for it.
        dataloader_num_workers=0,
        dataloader_pin_memory=run.compute.device.type == "cuda",
    )
