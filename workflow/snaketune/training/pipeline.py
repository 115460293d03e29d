"""A training from start to end, for any rows and any loss: load, check, add adapters, train, merge and save."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from snaketune.cluster.job_endings import job_end_time
from snaketune.config.optimizers import MUON
from snaketune.engine.checkpoints import diverged, last_checkpoint, remove_incomplete, step_of
from snaketune.engine.features import Options, TrainingFeatures
from snaketune.engine.fsdp import shard
from snaketune.engine.held_out import HeldOut, why_not_measurable
from snaketune.engine.measurements import HeldOutSettings, has_its_best
from snaketune.engine.model.adapters import leave_casts_to_autocast, load_adapter_weights
from snaketune.engine.model.device_speed import probe
from snaketune.engine.model.devices import Compute, deterministic_algorithms, keep_freed_memory
from snaketune.engine.model.forward import inner_model, without_dropout
from snaketune.engine.model.machine import is_out_of_memory, processor
from snaketune.engine.model.parameters import parameter_count, train_only
from snaketune.engine.model.selftest import allow_also, self_test
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.engine.preemption import EndOfSnapshot, PreemptionCallback
from snaketune.engine.throughput import LogCallback
from snaketune.engine.trainer import PackedTrainer
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import stored_dtype
from snaketune.models.lora import add_lora
from snaketune.stages.cache.attempt import check_files
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tracking.curves import Curves
from snaketune.training.autotune.batch_plan import (
    IN_STEPS,
    BatchPlan,
    read_curve,
    record_out_of_memory,
    slowdown_percent,
)
from snaketune.training.autotune.machine_check import MachineCheck, check_machine
from snaketune.training.launch.worker import is_main_process
from snaketune.training.launch.worker_endings import record_preemption
from snaketune.training.preflight_record import read_preflight_findings
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.save_model import save_trained
from snaketune.training.trainer_arguments import training_arguments

# Shorter trainings aren't worth the second that a probe of the machine takes.
PROBED_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Facts about a loaded model, with its adapters.

    Attributes:
        about, run: of its check, for manifest and run.json.
        parameters, trainable: all of them, and those that are trained.
    """

    about: dict[str, Any]
    run: dict[str, Any]
    parameters: int
    trainable: int


@contextmanager
def ready_trainer(training: PreparedTraining) -> Iterator[tuple[TrainingFeatures, LoadedModel]]:
    """Yield a trainer with its model: loaded, checked, with adapters where the spec has them.

    Raises:
        SnaketuneError: there are no rows, or the model can't be trained on them correctly.
    """
    trainer_class, rows, run, config = training.trainer_class, training.rows, training.run, training.config
    spec, compute = run.spec, run.compute
    if not len(rows):
        raise SnaketuneError("there is no row to train on; lower the corpus' held_out, or check what packing dropped")
    with deterministic_algorithms(spec.training.deterministic):
        # Before a model from scratch or adapters are initialized at random.
        set_seed(spec.training.seed)
        dtype = compute.weights_dtype(frozen=spec.lora is not None)
        # Shards in float32 are loaded as stored: the processes then share the pages of the files, and each shard is converted
        # on its own.
        as_stored = run.in_shards and dtype == torch.float32 and not spec.quantization
        model = training.load(stored_dtype(config) or dtype if as_stored else dtype)
        if not spec.quantization and not run.in_shards:
            model = model.to(compute.device)
        parameters = parameter_count(model)
        with nullcontext() if trainer_class.drops_out else without_dropout(model):
            if run.in_shards:
                # The unsharded model may not fit a device, so it is checked in shards, with its adapters.
                model = _with_trained_parameters(model, run)
                shard(model, compute, dtype)
                about, measured, compute = _check_model(inner_model(model), training)
            else:
                about, measured, compute = _check_model(model, training)
                model = _with_trained_parameters(model, run)
            loaded = LoadedModel(about=about, run=measured, parameters=parameters, trainable=_trainable_count(model))
            yield make_trainer(training, model, compute), loaded


def _check_model(model: PreTrainedModel, training: PreparedTraining) -> tuple[dict[str, Any], dict[str, Any], Compute]:
    """Check that packed logits equal those of separate sequences; return facts for manifest and run.json, and the kernel."""
    rows, held_out, compute = training.rows, training.held_out, training.run.compute
    if not isinstance(rows, PackedRows):
        # Every row is a single sequence for the model's own attention.
        return {"trainer": "trl", "dtype": compute.about()["dtype"]}, {}, compute
    tested = self_test(model, [rows], compute, training=True)
    if training.run.operation.evaluate and held_out and held_out.has_prefixes and not rows.has_prefixes:
        # Of conversations that branch, all may be held out. They don't decide what the training is computed by.
        allow_also(model, held_out, tested.compute)
    return tested.about(), {"self_test_share": tested.share}, tested.compute


def make_trainer(training: PreparedTraining, model: torch.nn.Module, compute: Compute) -> TrainingFeatures:
    """The engine's trainer as spec and operation ask for it."""
    run = replace(training.run, compute=compute)
    spec, operation, rows = run.spec, run.operation, training.rows
    items = len(EqualTokens(rows)) if isinstance(rows, PackedRows) else len(rows)
    average, lora = spec.training.average, spec.lora
    options = Options(
        log_prefix=f"{run.tracked.name}: " if run.tracked else "",
        skip_rate_zero=True,
        compile=spec.training.compile,
        offload=run.offloads,
        muon=spec.training.optimizer == MUON,
        loraplus_lr_ratio=lora and lora.loraplus_lr_ratio,
        neftune_noise_alpha=spec.training.neftune_noise_alpha,
        eva=bool(lora and lora.init_lora_weights == "eva" and not run.adapter),
        ema=average and average.ema,
        launch=operation.launch,
        zero_stage=operation.zero_stage,
        check_lock=run.work.check_held,
    )
    return training.trainer_class(
        model=model,
        args=training_arguments(run, items),
        train_dataset=rows,
        compute=compute,
        options=options,
        **training.loss,
    )


def measure_held_out(trainer: PackedTrainer, training: PreparedTraining) -> None:
    """Have a trainer measure the training's held-out rows, if the run has measurements, unless only another kernel can."""
    run, selection = training.run, training.run.spec.training
    if not run.operation.evaluate:
        return
    config, rows = training.any_config, training.held_out
    if why_not := why_not_measurable(trainer.model, trainer.compute.kernel, rows, config):
        if selection.selects:
            raise SnaketuneError(
                f"training.keep and training.stop_if need held-out rows, and {why_not}. Remove them, or choose another held_out"
            )
        print(f"held-out rows aren't measured: {why_not}", flush=True)
        return
    settings = HeldOutSettings(
        **run.operation.evaluate.model_dump(),
        metric=selection.metric,
        keep_best=selection.keep == "best",
        patience=selection.stop_if and selection.stop_if.held_out_rises,
    )
    answers = not (run.in_shards or run.operation.launch == "deepspeed") and training.initial.tokenizer is not None
    answers = answers and trainer.answers_prompts
    decoder = partial(ChatTokenizer.load, training.initial.tokenizer) if answers else None
    trainer.held_out = HeldOut(trainer, rows, settings, run.best, decoder)
    trainer.add_callback(trainer.held_out)


def _trainable_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _with_trained_parameters(model: PreTrainedModel, run: TrainingRun) -> torch.nn.Module:
    """Return the model with its adapters, if it has any, and everything frozen that isn't trained."""
    if run.spec.training.trainable:
        train_only(model, run.spec.training.trainable)
    if not run.spec.lora:
        return model
    adapted = add_lora(model, run.spec.lora)
    if run.compute.dtype != torch.float32:
        leave_casts_to_autocast(adapted)
    if run.adapter:
        load_adapter_weights(adapted, run.adapter)
    if run.operation.gradient_checkpointing:
        adapted.enable_input_require_grads()
    return adapted


def examine_machine(training: PreparedTraining) -> MachineCheck:
    """Compare the needs of a training with this machine, before its model is loaded."""
    run = training.run
    arguments = training.loss
    per_token = arguments.get("loss") == "dft" or arguments.get("distillation") or training.rows.weighted
    summed = training.trainer_class.sums_losses and not per_token
    trainer_class = training.trainer_class
    computed = {"dropout": trainer_class.drops_out, "summed": summed, "trained_model": trainer_class.trained_model}
    return check_machine(run.spec, run.operation, run.compute, training.any_config, training.rows, **computed)


def refuse_unfit_machine(training: PreparedTraining) -> MachineCheck:
    """Return `examine_machine` and print its notes; raise SnaketuneError if the training doesn't fit the machine."""
    check = examine_machine(training)
    report_findings(check.findings, log=is_main_process())
    return check


def train(training: PreparedTraining) -> Outcome:
    """Load a model, train it, and write it to the payload of its work folder.

    Raises:
        SnaketuneError: see `ready_trainer`; or the training doesn't fit the machine, or it diverged.
        Preempted: the training ended early, with a checkpoint.
    """
    check = refuse_unfit_machine(training)
    run, compute = training.run, training.run.compute
    if compute.device.type == "cpu":
        keep_freed_memory()
    with ready_trainer(training) as (trainer, loaded):
        # Not in trials of speed, which take a few steps.
        measure_held_out(trainer, training)
        print(f"rows: {training.rows}", trainer.meter, sep="\n", flush=True)
        # Read before training, since the calibration file may change meanwhile.
        plan, curve = BatchPlan.of(vars(run.operation)), read_curve(run.operation)
        started = time.monotonic()
        history = fit(trainer, run, lambda: describe_training(trainer, loaded, check))
        took = time.monotonic() - started
        concluded, held_out = trainer.conclusions(), trainer.held_out
        measured = held_out.about(took) if held_out else {}
        kept = trainer.use_final_weights()
    try:
        dtypes = save_trained(trainer, training)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Smaller micro-batches, the advice of other such errors, wouldn't help.
        raise SnaketuneError(
            f"all steps are done, and memory ran out while the model was merged and saved: {error}. Run again where there is "
            "more memory; the run resumes from the last checkpoint"
        ) from None
    throughput = trainer.meter.about(history)
    expected = check.estimate.expected if check.estimate else None
    print(f"peak memory: {throughput['peak_memory_gb']:.2f} GB, {check.expected}", flush=True)
    on_cuda = compute.device.type == "cuda"
    return Outcome(
        counts=trainer.counts() | {"steps": trainer.state.global_step},
        about=loaded.about
        | ({"stopped": concluded["stopped"]} if "stopped" in concluded else {})
        | ({"stopped": held_out.stopped} if held_out and held_out.stopped else {})
        | kept
        | {"compiled": trainer.compiled, "parameters": loaded.parameters, "trainable_parameters": loaded.trainable}
        | ({"resumed_from_numerics": trainer.numerics[:-1]} if trainer.numerics[1:] else {})
        | dtypes,
        run={
            "history": history,
            "device": torch.cuda.get_device_name(compute.device) if on_cuda else compute.device.type,
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "processes": trainer.args.world_size,
            **({"probe": probe(compute.device, run.work.state)} if took > PROBED_SECONDS else {}),
            **asdict(plan),
            "calibration": curve if curve and curve["trials"] else None,
            "slower_than_best_percent": slowdown_percent(plan, curve) if curve else None,
            "preflight": read_preflight_findings(run.operation),
            **throughput,
            "expected_memory_gb": expected and round(expected / 1e9, 3),
            **loaded.run,
            **measured,
            **kept,
            **concluded,
        },
    )


def describe_training(trainer: TrainingFeatures, loaded: LoadedModel, check: MachineCheck) -> str:
    """The first line of a training's log: model, machine, data type, kernel, micro-batches and expected memory."""
    args = trainer.args
    trained = f", {_short(loaded.trainable)} of them trained," if loaded.trainable != loaded.parameters else ""
    each = f" in each of {args.world_size} processes" if args.world_size > 1 else ""
    facts = [
        f"model: {_short(loaded.parameters)} parameters{trained} on {check.machine}",
        trainer.compute.about()["dtype"],
        loaded.about.get("kernel", "its own attention"),
        "compiled" if trainer.compiled else "not compiled",
        f"micro-batch {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}{each}",
        "activations recomputed" if args.gradient_checkpointing else "",
        "activations offloaded" if trainer.options.offload else "",
        check.expected,
    ]
    return ", ".join(filter(None, facts))


def _short(count: int) -> str:
    """
    >>> _short(23_110_272), _short(7_696_356_864), _short(9_216)
    ('23.1M', '7.70G', '9.22k')
    """
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= pair[0]), (1, ""))
    digits = max(0, 2 - int(math.log10(max(1, count / size))))
    return f"{count / size:.{digits if unit else 0}f}{unit}"


def fit(trainer: TrainingFeatures, run: TrainingRun, first_line: Callable[[], str] = str) -> list[dict[str, float]]:
    """Train, from the last checkpoint where there is one, and return the log entries that have a loss.

    Args:
        first_line: called before the first step; its result is printed.
    Raises:
        SnaketuneError: the training diverged, or a checkpoint doesn't fit the model.
        Preempted: the training ended early, with a checkpoint.
    """
    work, is_main = run.work, trainer.is_world_process_zero()
    if until := run.spec.training.until:
        # Before the log's, so that its last step has a line.
        trainer.add_callback(EndOfSnapshot(until))
    trainer.add_callback(LogCallback(trainer.options.log_prefix))
    if is_main:
        remove_incomplete(run.checkpoints)
        remove_incomplete(run.best)
    trainer.accelerator.wait_for_everyone()
    # The base has been read; if its files changed since the job began, no checkpoint may be written from it.
    check_files(work.state)
    last, selection = last_checkpoint(run.checkpoints), run.spec.training
    if last and selection.keep == "best" and not has_its_best(last, run.best, selection.metric):
        print(f"{last} is not used: the weights of its best measurement are missing or damaged", flush=True)
        last = None
    if last is not None:
        print(f"resuming from {last}", flush=True)
    else:
        trainer.initialize_adapters()
        trainer.check_start()
    trainer.compile()
    if line := first_line():
        print(line, flush=True)
    preemption = trainer.preemption = PreemptionCallback(_trainable_count(trainer.model), work.state, job_end_time)
    trainer.add_callback(preemption)
    with Curves(run.tracked if is_main else None, step_of(last) if last else 0) as curves:
        trainer.add_callback(curves)
        mean_loss = take_steps(trainer, work, resume_from_checkpoint=str(last) if last else None).training_loss
        # The steps after the last log line may have diverged.
        if not math.isfinite(mean_loss):
            raise diverged(trainer.state.global_step, f"the mean loss of the steps is {mean_loss}")
        trainer.finite_tensors()
    if preemption.reason:
        raise record_preemption(work.state, trainer.state.global_step, preemption.reason, is_main)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def take_steps(trainer: TrainingFeatures, work: WorkFolder, **keywords: Any) -> Any:
    """Train, and record the step if memory runs out."""
    (work.state / IN_STEPS).touch()
    try:
        return trainer.train(**keywords)
    except Exception as error:
        if is_out_of_memory(error):
            record_out_of_memory(work.state, trainer.state.global_step + 1, error)
        raise
