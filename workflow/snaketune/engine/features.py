"""What every training adds to a Trainer: exact checkpoints, a fixed order of rows, prefetch, throughput, held-out rows.

The Trainer's loop, schedule, precision and distribution are used as they are. This is a mixin since it serves two Trainers:
transformers', of `engine.trainer`, and TRL's SFTTrainer for rows that aren't packed. Its parts have modules of their own.

    checkpoint-40/
        complete                      digests of all other files; written last
        weights.safetensors           what training changes (or a folder of shards), and `average` if there is one
        optimizer.safetensors, .json  states, groups and schedule
        random-0.safetensors          generators of each process
        trainer_state.json            step, and the log so far
        unlogged.json                 loss and tokens of the steps since the last log line
        computed_as.json              data types and kernels
        pair_metrics.json             of trainings on pairs: sums since the last log line, and of DPO's monitor over its window

A resume restores weights and what isn't logged yet, then the Trainer's state, the schedule, the optimizer, the epoch's order of
rows, of which those that were seen are skipped, and last the random states, once the first step's batches are made.
"""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.engine import random_states
from snaketune.engine.average import AveragedWeights
from snaketune.engine.checkpoints import (
    UNLOGGED,
    WEIGHTS,
    add_numerics,
    complete_checkpoints,
    diverged,
    first_not_finite,
    load_weights,
    mark_complete,
    save_numerics,
    step_of,
    trained_tensors,
)
from snaketune.engine.data_order import EpochPermutation, Prefetcher, overlaps
from snaketune.engine.fsdp import check_strategy, full_tensor, is_sharded, reshard
from snaketune.engine.held_out import HeldOut
from snaketune.engine.model.devices import Compute
from snaketune.engine.optimizer_states import load_optimizer, save_optimizer
from snaketune.engine.optimizers import create_optimizer, without_rate_zero
from snaketune.engine.preemption import PreemptionCallback
from snaketune.engine.tensor_files import write
from snaketune.engine.throughput import ThroughputMeter
from snaketune.engine.zero import UnshardedOptimizer, gathered_weight, is_zero, trained_weights
from snaketune.files import write_json


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a training does beyond transformers' TrainingArguments.

    Attributes:
        log_prefix: of each line about steps, to tell them from those of other trainings on the same terminal.
        compile: whether layers are compiled; `auto` compiles where that pays.
        offload: whether activations that the backward pass needs are moved to host memory.
        muon: whether Muon updates the matrices, and AdamW all else.
        loraplus_lr_ratio: of LoRA+: how much higher the learning rate of the adapters' second matrices is.
        neftune_noise_alpha: strength of the noise on embeddings, see `engine.embedding_noise`.
        eva: whether adapters begin with the main directions of their layers' inputs, see `engine.eva`.
        skip_rate_zero: whether a warm-up begins above a learning rate of zero, at which the first step would change nothing.
        ema: decay of the moving average of the weights; None for none.
        launch, zero_stage: how processes share the model: `ddp`, `fsdp` or `deepspeed`; checked once the model is prepared.
        check_lock: raises if another process has taken over the folder of the checkpoints.
    """

    log_prefix: str = ""
    compile: Literal["auto"] | bool = False
    offload: bool = False
    muon: bool = False
    loraplus_lr_ratio: float | None = None
    neftune_noise_alpha: float | None = None
    eva: bool = False
    skip_rate_zero: bool = False
    ema: float | None = None
    launch: str = "ddp"
    zero_stage: int | None = None
    check_lock: Callable[[], None] = field(default=_nothing)


class TrainingFeatures(TrainerCallback):
    """Mixin for a Trainer, and a callback of it: those that are added later find a checkpoint complete when it is saved."""

    # What is trained, and how.
    rows: Any
    compute: Compute
    options: Options
    # Whether the model's dropout is active in training.
    drops_out = True
    # Whether the loss is a sum over the batch, so that the chunked head can compute gradients in the forward pass.
    sums_losses = True
    # Whether the model writes text, so that it can answer held-out prompts while it is trained.
    answers_prompts = True
    compiled = False

    # Parts.
    meter: ThroughputMeter
    order: EpochPermutation
    prefetcher: Prefetcher | None = None
    average: AveragedWeights | None = None
    held_out: HeldOut | None = None
    # None in trainings that aren't continued elsewhere: trials of speed.
    preemption: PreemptionCallback | None = None

    # State, which checkpoints hold besides the Trainer's: the sum of the micro-batches' shares of the loss since the last log
    # line, on this process' device; and the data types and kernels in order of use, see `checkpoints.NUMERICS`.
    unlogged_loss: torch.Tensor | float = 0.0
    numerics: list[dict[str, str]]
    # The optimizer's parameter groups before DeepSpeed wraps it.
    groups: list[list[torch.nn.Parameter]]

    def __init__(self, *, rows: Any, compute: Compute, options: Options, **arguments: Any):
        self.rows, self.compute, self.options, self.numerics = rows, compute, options, []
        super().__init__(**arguments)
        # Set after construction and not on the model: the constructor refuses to save such a model in the Trainer's own format.
        self.is_distributed_loading_by_transformers = is_sharded(self.model)
        self.meter = ThroughputMeter(self.model, compute, self.args.world_size)
        self.remove_callback(PrinterCallback)
        self.add_callback(self)

    # What a subclass defines or may change.

    @staticmethod
    def trained_model(model: PreTrainedModel, seed: int) -> PreTrainedModel:
        """The model that is trained, from the causal language model that was loaded. Args: seed: of new weights."""
        return model

    def initialize_adapters(self) -> None:
        """Set initial values of adapters that depend on the rows; called before `check_start`, not on resume."""

    def check_start(self) -> None:
        """Raise SnaketuneError if training can't start from this model; called before step 1, not on resume."""

    def compile(self) -> None:
        """Compile the model if configured, or if `auto` expects a gain; called before the first step of this process."""

    def counts(self) -> dict[str, int]:
        """Rows, and document tokens of all steps."""
        return {"rows": len(self.rows), "tokens": self.state.num_input_tokens_seen}

    def conclusions(self) -> dict[str, Any]:
        """Facts that are known after the last step."""
        return {}

    def items_per_epoch(self) -> int:
        """Without a blank item at the end of the training set."""
        return len(self.train_dataset)

    def item_weights(self) -> np.ndarray | None:
        """Weights that are balanced over the steps, int64[items]; None to leave steps unbalanced."""
        return None

    # The loop.

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train; the prefetch thread ends in any case."""
        # The optimizer must be created on shards.
        reshard(self.model)
        if self.options.ema and self.average is None:
            # After the adapters are initialized, by which their weights may become others.
            self.average = AveragedWeights(self.model, self.options.ema)
            self.add_callback(self.average)
        try:
            return super().train(*arguments, **keywords)
        finally:
            self.stop_prefetch()

    @property
    def gather_processes(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Gathers a tensor of all processes along its first dimension; None for a single process."""
        return self.accelerator.gather if self.args.world_size > 1 else None

    def _get_train_sampler(self, train_dataset=None):
        args, processes = self.args, self.args.world_size
        per_micro_step = args.per_device_train_batch_size * processes
        self.order = EpochPermutation(
            self.items_per_epoch(),
            args.seed,
            per_micro_step if processes > 1 else 1,
            shuffled=self.rows.order == "shuffled",
            weights=self.item_weights(),
            batch=per_micro_step * args.gradient_accumulation_steps,
        )
        return self.order

    def on_epoch_begin(self, args, state, control, **_):
        """Set the epoch of the order: in a resumed epoch the Trainer informs only the wrapper that skips batches."""
        self.order.set_epoch(state.epoch)

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        # Stopped by a measurement that was repeated.
        if not self.control.should_training_stop:
            super()._run_epoch(*arguments, **keywords)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of a step, prefetched on a GPU. At least a whole step is: the Trainer takes all its batches before the
        first."""
        if overlaps(device) and (self.prefetcher is None or self.prefetcher.source is not epoch_iterator):
            self.stop_prefetch()
            self.prefetcher = Prefetcher(epoch_iterator, max(2, self.args.gradient_accumulation_steps), device)
        batches = self.prefetcher if overlaps(device) else epoch_iterator
        return super().get_batch_samples(self.meter.batches(batches), num_batches, device)

    def stop_prefetch(self) -> None:
        """Stop the thread, at the end of an epoch or of the training; also after an error."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **keywords)
        self.unlogged_loss = self.unlogged_loss + loss
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # The meter counts them, and the Trainer would iterate over all parameters for every batch.
        return 0

    def create_optimizer(self, model=None):
        model = self.model if model is None else model
        self.optimizer = (
            create_optimizer(self, model, self.options.muon, self.options.loraplus_lr_ratio) or self.optimizer
        )
        optimizer = super().create_optimizer(model)
        # DeepSpeed drops empty groups; without them everywhere, checkpoints are the same with and without DeepSpeed.
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The Trainer's schedule; with `skip_rate_zero` without a step at a rate of zero."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if self.options.skip_rate_zero:
            schedule = self.lr_scheduler = without_rate_zero(schedule, self.args.get_warmup_steps(num_training_steps))
        return schedule

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Complete the line of a training: its mean loss over all processes, throughput, and the meter's means."""
        if "loss" in logs:
            # The Trainer's own mean knows the steps of this process only.
            before = next((line["step"] for line in reversed(self.state.log_history) if "loss" in line), 0)
            losses = torch.as_tensor(self.unlogged_loss, device=self.args.device)[None]
            losses = self.gather_processes(losses) if self.gather_processes else losses
            logs["loss"] = losses.mean().item() / (self.state.global_step - before)
            self.unlogged_loss = 0.0
            logs |= self.meter.read(self.gather_processes)
            # The count is saved in checkpoints, as are the tokens that no line has counted yet.
            self.state.num_input_tokens_seen += int(logs.pop("tokens", 0))
        # Not TRL's, which adds means over the steps of this process.
        Trainer.log(self, logs, *arguments, **keywords)

    # Held-out rows.

    def held_out_metrics(self, batches) -> dict[str, float]:
        """Compute metrics of the batches of all processes, `loss` among them; every process calls it, with equally many."""
        raise TypeError("a subclass defines this")

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        """Measure after a step; replaces the Trainer's own evaluation."""
        # At the end of an epoch the Trainer would evaluate again.
        self.control.should_evaluate = False
        if self.held_out:
            self.held_out.after_step()
        return {}

    def use_final_weights(self) -> dict[str, Any]:
        """Load the weights that are kept, or their average, after the last step; return facts for the manifest."""
        if self.held_out and self.held_out.settings.keep_best:
            return self.held_out.use_best()
        if self.average:
            self.average.swap()
        return {}

    # Sharded models.

    def _move_model_to_device(self, model, device):
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def _defer_fsdp_gradient_reduction(self):
        # Not deferred: unsharded gradients would have to be accumulated.
        return nullcontext()

    def _clip_grad_norm(self, model):
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self.is_deepspeed_enabled:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        else:
            # DeepSpeed takes its weights from the model, so they are loaded first; transformers would look for its own
            # checkpoint.
            if resume_from_checkpoint:
                self._load_from_checkpoint(resume_from_checkpoint)
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        check_strategy(self.options.launch, self.options.zero_stage, self.model_wrapped)
        return prepared

    def full_tensor_of(self) -> Callable[[torch.nn.Parameter], torch.Tensor] | None:
        """The function that gathers a weight; None if the model isn't sharded. Called last: it ends the use of DeepSpeed."""
        if is_zero(self.model_wrapped):
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            # Afterwards a single process can load a model on its own.
            unset_hf_deepspeed_config()
            return gathered_weight
        return full_tensor if is_sharded(self.model) else None

    # Checkpoints: what is saved.

    def _save_checkpoint(self, model, trial):
        self.options.check_lock()
        self.meter.stop()
        unlogged = [[float(self.unlogged_loss), *self.meter.unlogged()]]
        if self.gather_processes:
            gathered = torch.tensor(unlogged, dtype=torch.float64, device=self.args.device)
            unlogged = self.gather_processes(gathered).tolist()
        if not all(math.isfinite(loss) for loss, *_ in unlogged):
            raise diverged(self.state.global_step, "the loss of a step since the last log line isn't finite")
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            write_json(self.checkpoint_folder / UNLOGGED, unlogged)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of this step's checkpoint."""
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def save_model(self, output_dir=None, _internal_call=False):
        self._save(output_dir)

    def _save(self, output_dir=None, state_dict=None):
        folder, is_main = Path(output_dir), self.args.should_save
        if is_main:
            save_numerics(folder, self.numerics or [self.compute.about()])
        write(folder, WEIGHTS, self.finite_tensors(keep=is_main), is_main)
        if self.average:
            self.average.save(folder, is_main)

    def _save_optimizer_and_scheduler(self, output_dir):
        save_optimizer(Path(output_dir), self._unsharded_optimizer, self.lr_scheduler, self.args.should_save)

    def _save_rng_state(self, output_dir):
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        random_states.save_random_state(random_states.state_file(Path(output_dir), self.args.process_index))

    def on_save(self, args, state, control, **_):
        """Mark the checkpoint as complete once all its files are on disk, and remove older ones; called on every process."""
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        # Another process that has taken over the folder may write its checkpoints there.
        folder, check_lock = Path(args.output_dir), self.options.check_lock
        mark_complete(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", check_lock)
        check_lock()
        for other in complete_checkpoints(folder):
            if step_of(other) < state.global_step:
                shutil.rmtree(other)

    def finite_tensors(self, keep: bool = False) -> dict[str, torch.Tensor]:
        """Return the trained tensors; raise SnaketuneError in every process, which all call it, if a weight isn't finite.

        Args:
            keep: whether this process receives the tensors that DeepSpeed has to gather.
        """
        model = self.accelerator.unwrap_model(self.model)
        if is_zero(self.model_wrapped):
            tensors, wrong = trained_weights(model, keep)
        else:
            tensors = trained_tensors(model)
            wrong = first_not_finite(tensors)
        if wrong:
            raise diverged(self.state.global_step, f"{wrong} holds numbers that aren't finite")
        return tensors

    @property
    def _unsharded_optimizer(self) -> Any:
        return UnshardedOptimizer(self.model_wrapped, self.groups) if is_zero(self.model_wrapped) else self.optimizer

    # Checkpoints: what a resume restores.

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        folder = Path(resume_from_checkpoint)
        self.numerics = add_numerics(folder, self.compute.about())
        load_weights(folder, model or self.model)
        if self.average:
            self.average.load(folder)
        unlogged = json.loads((folder / UNLOGGED).read_text(encoding="utf-8"))
        if len(unlogged) == self.args.world_size:
            self.unlogged_loss, *counted = unlogged[self.args.process_index]
        else:
            # Of another number of processes: each loss is an estimate of that of the whole step, and counts are added up.
            losses, *counts, seconds = zip(*unlogged)
            self.unlogged_loss = sum(losses) / len(losses)
            is_first = self.args.process_index == 0
            counted = [*(sum(count) if is_first else 0.0 for count in counts), max(seconds)]
        self.meter.restore(counted)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            load_optimizer(Path(checkpoint), self._unsharded_optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            process, processes = self.args.process_index, self.args.world_size
            random_states.restore(Path(checkpoint), process, processes, self.args.seed, self.state.global_step)
