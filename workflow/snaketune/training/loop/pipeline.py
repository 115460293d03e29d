"""A training from start to end, for any rows and any loss: load, check, add adapters, train, merge and save."""

import math
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel, set_seed
from transformers.trainer_callback import PrinterCallback

from snaketune.config.training_runs import Pretrained, Quantization
from snaketune.errors import SnaketuneError
from snaketune.models.adapters import add_lora, leave_casts_to_autocast, load_adapter_weights
from snaketune.models.device_speed import probe, processor
from snaketune.models.devices import Compute, deterministic_algorithms, keep_freed_memory
from snaketune.models.forward import inner_model, without_dropout
from snaketune.models.load_model import parameter_count, stored_dtype
from snaketune.models.machine import is_out_of_memory
from snaketune.stages.cache.attempt import check_files
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.tracking.curves import track_curves
from snaketune.training.autotune.batch_plan import BatchPlan, read_curve, slowdown_percent
from snaketune.training.autotune.machine_check import MachineCheck, check_machine
from snaketune.training.checkpoint.checkpoints import (
    MarkComplete,
    diverged,
    last_checkpoint,
    remove_incomplete,
)
from snaketune.training.checkpoint.save_model import choose_dtype, gather_trained, save_trained
from snaketune.training.launch.worker import is_main_process
from snaketune.training.launch.worker_endings import record_preemption
from snaketune.training.loop.preemption import PreemptionCallback
from snaketune.training.loop.preflight_record import read_preflight_findings
from snaketune.training.loop.sample_order import SetEpoch
from snaketune.training.loop.trainer import BaseTrainer, LogCallback, TrainingRun
from snaketune.training.parallel.fsdp import shard

# Loads the model in a data type, quantized or not.
Load = Callable[[torch.dtype, Quantization | None], PreTrainedModel]


class PreparedTraining(NamedTuple):
    """The arguments of `train`."""

    trainer_class: type[BaseTrainer]
    rows: Sized
    run: TrainingRun
    load: Load
    config: PretrainedConfig | None = None
    base: Pretrained | None = None
    made: PretrainedConfig | None = None


@dataclass(frozen=True, kw_only=True)
class ReadyTrainer:
    """A trainer whose model is loaded and checked.

    Attributes:
        about: facts for the manifest.
        facts: facts for run.json.
        parameters, trainable: the number of parameters, and of those that are trained.
    """

    trainer: BaseTrainer
    about: dict[str, Any]
    facts: dict[str, Any]
    parameters: int
    trainable: int


@contextmanager
def ready_trainer(
    trainer_class: type[BaseTrainer], rows: Sized, run: TrainingRun, load: Load, config: PretrainedConfig | None = None
) -> Iterator[ReadyTrainer]:
    """Yield a trainer with its model: loaded, checked, with adapters where the spec has them.

    Args:
        rows: training rows, as the trainer takes them; `str(rows)` describes them in the log.
        config: the config of the model that `load` returns; None for a model from scratch.
    Raises:
        SnaketuneError: there are no rows, or the model can't be trained on them correctly.
    """
    if not len(rows):
        raise SnaketuneError("there is no row to train on; lower the corpus' held_out, or check what packing dropped")
    spec, compute = run.spec, run.compute
    with deterministic_algorithms(spec.training.deterministic):
        # Before a model from scratch or adapters are initialized at random.
        set_seed(spec.training.seed)
        if config:
            trainer_class.check_config(config, rows, compute)
        dtype = compute.weights_dtype(frozen=spec.lora is not None)
        model = load(_loaded_dtype(run, dtype, config), spec.quantization)
        if not spec.quantization and not run.in_shards:
            model = model.to(compute.device)
        parameters = parameter_count(model)
        with nullcontext() if trainer_class.drops_out else without_dropout(model):
            if run.in_shards:
                # The unsharded model may not fit a device, so it is checked in shards, with its adapters.
                model = _with_adapters(model, run)
                shard(model, compute, dtype)
                about, facts = trainer_class.check_model(inner_model(model), rows, compute)
            else:
                about, facts = trainer_class.check_model(model, rows, compute)
                model = _with_adapters(model, run)
            trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
            trainer = trainer_class(model=model, rows=rows, run=run)
            yield ReadyTrainer(trainer=trainer, about=about, facts=facts, parameters=parameters, trainable=trainable)


def examine_machine(
    trainer_class: type[BaseTrainer], rows: Sized, run: TrainingRun, config: PretrainedConfig | None
) -> MachineCheck:
    """Compare the needs of a training with this machine, before its model is loaded."""
    dropout, summed = trainer_class.drops_out, trainer_class.sums_losses
    return check_machine(run.spec, run.operation, run.compute, config, rows, dropout=dropout, summed=summed)


def refuse_unfit_machine(
    trainer_class: type[BaseTrainer], rows: Sized, run: TrainingRun, config: PretrainedConfig | None
) -> MachineCheck:
    """Return `examine_machine` of the same arguments, and print its notes.

    Raises:
        SnaketuneError: the training doesn't fit the machine.
    """
    check = examine_machine(trainer_class, rows, run, config)
    report_findings(check.findings, log=is_main_process())
    return check


def train(
    trainer_class: type[BaseTrainer],
    rows: Sized,
    run: TrainingRun,
    load: Load,
    config: PretrainedConfig | None = None,
    base: Pretrained | None = None,
    made: PretrainedConfig | None = None,
) -> Outcome:
    """Load a model, train it, and write it to `run.work.payload`.

    Args:
        rows, load, config: see `ready_trainer`.
        base: the model that `load` loads, unless that is a result of this workflow.
        made: the config of a model from scratch.
    Raises:
        SnaketuneError: see `ready_trainer`; or the training doesn't fit the machine, or it diverged.
        Preempted: the training ended early, with a checkpoint.
    """
    spec, compute = run.spec, run.compute
    check = refuse_unfit_machine(trainer_class, rows, run, config or made)
    if compute.device.type == "cpu":
        keep_freed_memory()
    with ready_trainer(trainer_class, rows, run, load, config) as ready:
        trainer = ready.trainer
        print(f"rows: {rows}", trainer.meter, sep="\n", flush=True)
        # Read before training, since the calibration file may change meanwhile.
        batch_plan = _batch_plan_facts(run)
        history = fit(trainer, lambda: describe_training(ready, check))
        concluded, facts = trainer.conclusions()
    with _explain_out_of_memory():
        saved, base_dtype = _save(trainer, run, load, config, base)
    return Outcome(
        counts=trainer.counts() | {"steps": trainer.state.global_step},
        about=ready.about
        | concluded
        | {"compiled": trainer.compiled, "parameters": ready.parameters, "trainable_parameters": ready.trainable}
        | ({"resumed_from_numerics": trainer.numerics[:-1]} if trainer.numerics[1:] else {})
        | {"saved_dtype": _dtype_name(saved)}
        | ({"base_dtype": _dtype_name(base_dtype)} if spec.lora and not spec.lora.merge else {}),
        run={
            "history": history,
            **_device_facts(compute, trainer.args.world_size),
            "probe": probe(compute.device, run.work.state),
            **batch_plan,
            "preflight": read_preflight_findings(run.operation),
            **_throughput_and_memory(trainer, history, check),
            **ready.facts,
            **facts,
        },
    )


@contextmanager
def _explain_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of saving into one that doesn't advise smaller micro-batches, which wouldn't help."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SnaketuneError(
            f"all steps are done, and memory ran out while the model was merged and saved: {error}. Run again where there is "
            "more memory; the run resumes from the last checkpoint"
        ) from None


def _save(
    trainer: BaseTrainer, run: TrainingRun, load: Load, config: PretrainedConfig | None, base: Pretrained | None
) -> tuple[torch.dtype, torch.dtype]:
    """Write the payload; return the data types of the saved weights, and of the base that adapters belong to."""
    spec, compute = run.spec, run.compute
    trained = trainer.accelerator.unwrap_model(trainer.model)
    saved = choose_dtype(spec.training.save_dtype, config, compute)
    # Adapters are merged into the weights that they were trained on; for QLoRA, into the weights before quantization.
    trained_on = compute.weights_dtype(frozen=spec.lora is not None)
    base_dtype = stored_dtype(config) or torch.float32 if spec.quantization else trained_on
    if full_tensor_of := trainer.full_tensor_of():
        gather_trained(trained, spec, saved, full_tensor_of=full_tensor_of, keep=trainer.is_world_process_zero())
    if trainer.is_world_process_zero():
        save_trained(
            trained,
            run.work.payload,
            spec,
            saved,
            lambda: load(base_dtype, None),
            base=base,
            known_tokens=config.get_text_config().vocab_size if config else None,
        )
    return saved, base_dtype


def describe_training(ready: ReadyTrainer, check: MachineCheck) -> str:
    """The first line of a training's log: model, machine, data type, kernel, micro-batches and expected memory."""
    trainer, compute = ready.trainer, ready.trainer.run.compute
    args = trainer.args
    trained = f", {_short(ready.trainable)} of them trained," if ready.trainable != ready.parameters else ""
    return ", ".join(
        [
            f"model: {_short(ready.parameters)} parameters{trained} on {check.machine}",
            compute.about()["dtype"],
            ready.about.get("kernel", "its own attention"),
            "compiled" if trainer.compiled else "not compiled",
            f"micro-batch {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
            + (f" in each of {args.world_size} processes" if args.world_size > 1 else ""),
            *(["activations recomputed"] if args.gradient_checkpointing else []),
            check.expected,
        ]
    )


def _short(count: int) -> str:
    """
    >>> _short(23_110_272), _short(7_696_356_864), _short(9_216)
    ('23.1M', '7.70G', '9.22k')
    """
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= pair[0]), (1, ""))
    digits = max(0, 2 - int(math.log10(max(1, count / size))))
    return f"{count / size:.{digits if unit else 0}f}{unit}"


def _throughput_and_memory(
    trainer: BaseTrainer, history: list[dict[str, float]], check: MachineCheck
) -> dict[str, Any]:
    """Throughput, peak memory and expected memory for run.json; peak and expectation are also printed."""
    about = trainer.meter.about(history)
    expected = check.estimate.expected if check.estimate else None
    if trainer.is_world_process_zero():
        print(f"peak memory: {about['peak_memory_gb']:.2f} GB, {check.expected}", flush=True)
    return about | {"expected_memory_gb": expected and round(expected / 1e9, 3)}


def _batch_plan_facts(run: TrainingRun) -> dict[str, Any]:
    """The batch plan, the calibration curve of such runs, and how much slower than its best the plan is, for run.json."""
    plan = BatchPlan.from_operation(run.operation)
    curve = read_curve(run.operation)
    slower = slowdown_percent(plan, curve) if curve else None
    return asdict(plan) | {"calibration": curve, "slower_than_best_percent": slower}


def _loaded_dtype(run: TrainingRun, dtype: torch.dtype, config: PretrainedConfig | None) -> torch.dtype:
    """The data type that weights are loaded in.

    For shards in float32 it is the stored one: the processes then share the pages of the files, and each shard is converted
    on its own.
    """
    as_stored = run.in_shards and dtype == torch.float32 and not run.spec.quantization
    return stored_dtype(config) or dtype if as_stored else dtype


def _with_adapters(model: PreTrainedModel, run: TrainingRun) -> torch.nn.Module:
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


def fit(trainer: BaseTrainer, first_line: Callable[[], str] = str) -> list[dict[str, float]]:
    """Train, from the last checkpoint where there is one.

    Args:
        first_line: called before the first step; its result is printed.
    Returns:
        The log entries that have a loss.
    Raises:
        SnaketuneError: the training diverged, or a checkpoint doesn't fit the model.
        Preempted: the training ended early, with a checkpoint.
    """
    checkpoints = trainer.run.checkpoints
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MarkComplete(trainer.run.work.check_held))
    trainer.add_callback(LogCallback())
    trainer.add_callback(SetEpoch(trainer))
    if trainer.is_world_process_zero():
        remove_incomplete(checkpoints)
    trainer.accelerator.wait_for_everyone()
    # The base has been read; if its files changed since the job began, no checkpoint may be written from it.
    check_files(trainer.run.work.state)
    last = last_checkpoint(checkpoints)
    if last is not None:
        print(f"resuming from {last}", flush=True)
    else:
        trainer.check_start()
    trainer.compile()
    if trainer.is_world_process_zero() and (line := first_line()):
        print(line, flush=True)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    preemption = PreemptionCallback(trained, trainer.run.work.state)
    trainer.add_callback(preemption)
    with track_curves(trainer, trainer.run.tracked):
        mean_loss = trainer.train(resume_from_checkpoint=str(last) if last else None).training_loss
        # The steps after the last log line may have diverged.
        if not math.isfinite(mean_loss):
            raise diverged(trainer.state.global_step, f"the mean loss of the steps is {mean_loss}")
        trainer.check_finite()
    if preemption.reason:
        raise record_preemption(
            trainer.run.work.state, trainer.state.global_step, preemption.reason, trainer.is_world_process_zero()
        )
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_facts(compute: Compute, processes: int) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(compute.device) if on_cuda else compute.device.type,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
