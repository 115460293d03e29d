"""A training from beginning to end, whatever its rows and its loss: load, check, adapt, train, merge and save."""

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
from snaketune.models.device_memory import is_out_of_memory
from snaketune.models.devices import Compute, deterministic_algorithms, keep_freed_memory
from snaketune.models.dropout import without_dropout
from snaketune.models.forward import inner_model
from snaketune.models.load_model import parameter_count, stored_dtype
from snaketune.models.speed_probe import probe, processor
from snaketune.stages.cache.attempt import check_files
from snaketune.stages.gpu_needs import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.tracking.curves import drawn
from snaketune.training.autotune.batch_plan import BatchPlan, read_curve, slowdown_percent
from snaketune.training.autotune.machine_check import MachineCheck, check_machine
from snaketune.training.checkpoint.checkpoints import (
    MarkComplete,
    diverged,
    last_checkpoint,
    remove_incomplete,
)
from snaketune.training.checkpoint.save_model import choose_dtype, gather_trained, save_trained
from snaketune.training.launch.requeue import leave
from snaketune.training.launch.worker import is_first_process
from snaketune.training.loop.preemption import Leave
from snaketune.training.loop.preflight_record import findings_before
from snaketune.training.loop.sample_order import SetEpoch
from snaketune.training.loop.trainer import BaseTrainer, Run, Watch
from snaketune.training.parallel.fsdp import shard

# Gives the model in a data type, quantized or not.
Load = Callable[[torch.dtype, Quantization | None], PreTrainedModel]


class Begun(NamedTuple):
    """What `train` takes."""

    trainer_class: type[BaseTrainer]
    rows: Sized
    run: Run
    load: Load
    config: PretrainedConfig | None = None
    base: Pretrained | None = None
    made: PretrainedConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A training that is about to begin: facts for the manifest and for run.json, and how many parameters there are."""

    trainer: BaseTrainer
    about: dict[str, Any]
    facts: dict[str, Any]
    parameters: int
    trainable: int


@contextmanager
def prepared(
    trainer_class: type[BaseTrainer], rows: Sized, run: Run, load: Load, config: PretrainedConfig | None = None
) -> Iterator[Prepared]:
    """A loaded model, checked and adapted, in its trainer.

    Args:
        rows: as the trainer takes them; as text they say what they are.
        config: of the model that `load` gives; None where it is made from scratch.
    Raises:
        SnaketuneError: no rows, or a model that can't be trained on them rightly.
    """
    if not len(rows):
        raise SnaketuneError("there is no row to train on; lower the corpus' held_out, or look at what packing dropped")
    spec, compute = run.spec, run.compute
    with deterministic_algorithms(spec.training.deterministic):
        # Before anything is drawn: new rows of the vocabulary, adapters.
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
                # Whole, it may not fit a device: it is checked in shards, which it lies in with its adapters.
                model = _adapted(model, run)
                shard(model, compute, dtype)
                about, facts = trainer_class.check_model(inner_model(model), rows, compute)
            else:
                about, facts = trainer_class.check_model(model, rows, compute)
                model = _adapted(model, run)
            trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
            trainer = trainer_class(model=model, rows=rows, run=run)
            yield Prepared(trainer=trainer, about=about, facts=facts, parameters=parameters, trainable=trainable)


def fitness_of(
    trainer_class: type[BaseTrainer], rows: Sized, run: Run, config: PretrainedConfig | None
) -> MachineCheck:
    """What is known of this training and its machine before its model is loaded."""
    dropout, summed = trainer_class.drops_out, trainer_class.sums_losses
    return check_machine(run.spec, run.operation, run.compute, config, rows, dropout=dropout, summed=summed)


def check_fitness(
    trainer_class: type[BaseTrainer], rows: Sized, run: Run, config: PretrainedConfig | None
) -> MachineCheck:
    """The same; notes are printed.

    Raises:
        SnaketuneError: it doesn't fit the machine.
    """
    found = fitness_of(trainer_class, rows, run, config)
    report_findings(found.findings, log=is_first_process())
    return found


def train(
    trainer_class: type[BaseTrainer],
    rows: Sized,
    run: Run,
    load: Load,
    config: PretrainedConfig | None = None,
    base: Pretrained | None = None,
    made: PretrainedConfig | None = None,
) -> Outcome:
    """Load a model, train it, and fill `run.work.payload` with it.

    Args:
        rows, load, config: as those of `prepared`.
        base: what `load` loads, where that is no result of this workflow.
        made: the config of a model from scratch.
    Raises:
        SnaketuneError: as `prepared`, a machine that it doesn't fit, or a training that diverges.
    """
    spec, compute = run.spec, run.compute
    fitness = check_fitness(trainer_class, rows, run, config or made)
    if compute.device.type == "cpu":
        keep_freed_memory()
    with prepared(trainer_class, rows, run, load, config) as ready:
        trainer = ready.trainer
        print(f"rows: {rows}", trainer.gauge, sep="\n", flush=True)
        # Whatever becomes of the curve while it trains.
        portions = _portions(run)
        history = fit(trainer, lambda: setting(ready, fitness))
        concluded, facts = trainer.conclusions()
    with _told_if_memory_runs_out():
        saved, base_dtype = _save(trainer, run, load, config, base)
    return Outcome(
        counts=trainer.counts() | {"steps": trainer.state.global_step},
        about=ready.about
        | concluded
        | {"compiled": trainer.compiled, "parameters": ready.parameters, "trainable_parameters": ready.trainable}
        | ({"resumed_from_numerics": trainer.ways[:-1]} if trainer.ways[1:] else {})
        | {"saved_dtype": _name(saved)}
        | ({"base_dtype": _name(base_dtype)} if spec.lora and not spec.lora.merge else {}),
        run={
            "history": history,
            **_where(compute, trainer.args.world_size),
            "probe": probe(compute.device, run.work.state),
            **portions,
            "preflight": findings_before(run.operation),
            **_memory(trainer, history, fitness),
            **ready.facts,
            **facts,
        },
    )


@contextmanager
def _told_if_memory_runs_out() -> Iterator[None]:
    """Fewer rows at once would be no help."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SnaketuneError(
            f"all steps are done, and memory ran out as the result was put together: {error}. Run again where there is more of "
            "it; it goes on from the last checkpoint"
        ) from None


def _save(
    trainer: BaseTrainer, run: Run, load: Load, config: PretrainedConfig | None, base: Pretrained | None
) -> tuple[torch.dtype, torch.dtype]:
    """Fill the payload. Returns the data types of what is saved, and of what adapters belong on."""
    spec, compute = run.spec, run.compute
    trained = trainer.accelerator.unwrap_model(trainer.model)
    saved = choose_dtype(spec.training.save_dtype, config, compute)
    # What adapters are merged into: the weights that they were learned on, or those that had to be in 4 bits for it.
    learned_on = compute.weights_dtype(frozen=spec.lora is not None)
    base_dtype = stored_dtype(config) or torch.float32 if spec.quantization else learned_on
    if whole_of := trainer.whole_of():
        gather_trained(trained, spec, saved, whole_of=whole_of, keep=trainer.is_world_process_zero())
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


def setting(made: Prepared, fitness: MachineCheck) -> str:
    """What is trained, on what, and how: the line that a training begins with."""
    trainer, compute = made.trainer, made.trainer.run.compute
    args = trainer.args
    trained = f", {_short(made.trainable)} of them trained," if made.trainable != made.parameters else ""
    return ", ".join(
        [
            f"model: {_short(made.parameters)} parameters{trained} on {fitness.machine}",
            compute.about()["dtype"],
            made.about.get("kernel", "its own attention"),
            "compiled" if trainer.compiled else "not compiled",
            f"micro-batch {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
            + (f" in each of {args.world_size} processes" if args.world_size > 1 else ""),
            *(["activations recomputed"] if args.gradient_checkpointing else []),
            fitness.expected,
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


def _memory(trainer: BaseTrainer, history: list[dict[str, float]], fitness: MachineCheck) -> dict[str, Any]:
    """What the gauge found, and the peak of memory beside the one that was expected, which is told."""
    about = trainer.gauge.about(history)
    expected = fitness.estimate.expected if fitness.estimate else None
    if trainer.is_world_process_zero():
        print(f"peak memory: {about['peak_memory_gb']:.2f} GB, {fitness.expected}", flush=True)
    return about | {"expected_memory_gb": expected and round(expected / 1e9, 3)}


def _portions(run: Run) -> dict[str, Any]:
    """What was computed at once, beside what was measured for such runs."""
    portions = BatchPlan.from_operation(run.operation)
    curve = read_curve(run.operation)
    lost = slowdown_percent(portions, curve) if curve else None
    return asdict(portions) | {"calibration": curve, "slower_than_best_percent": lost}


def _loaded_dtype(run: Run, dtype: torch.dtype, config: PretrainedConfig | None) -> torch.dtype:
    """What weights are read in. As they are stored, processes share the pages of the files; shards are rounded one by one."""
    as_stored = run.in_shards and dtype == torch.float32 and not run.spec.quantization
    return stored_dtype(config) or dtype if as_stored else dtype


def _adapted(model: PreTrainedModel, run: Run) -> torch.nn.Module:
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


def fit(trainer: BaseTrainer, begins: Callable[[], str] = str) -> list[dict[str, float]]:
    """Train, from the last checkpoint where there is one.

    Args:
        begins: what to say when all is known that there is to know before the first step.
    Returns:
        The lines of the log that have a loss.
    Raises:
        SnaketuneError: the training diverged, or a checkpoint doesn't fit; or it had to leave (`Left`).
    """
    checkpoints = trainer.run.checkpoints
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MarkComplete(trainer.run.work.check_held))
    trainer.add_callback(Watch())
    trainer.add_callback(SetEpoch(trainer))
    if trainer.is_world_process_zero():
        remove_incomplete(checkpoints)
    trainer.accelerator.wait_for_everyone()
    # The base has been read: from here on checkpoints hold what came of it.
    check_files(trainer.run.work.state)
    last = last_checkpoint(checkpoints)
    if last is not None:
        print(f"resuming from {last}", flush=True)
    else:
        trainer.check_start()
    trainer.compile()
    if trainer.is_world_process_zero() and (line := begins()):
        print(line, flush=True)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    leaving = Leave(trained, trainer.run.work.state)
    trainer.add_callback(leaving)
    with drawn(trainer, trainer.run.tracked):
        mean_loss = trainer.train(resume_from_checkpoint=str(last) if last else None).training_loss
        # The log may have looked for the last time before it happened.
        if not math.isfinite(mean_loss):
            raise diverged(trainer.state.global_step, f"the mean loss of the steps is {mean_loss}")
        trainer.check_finite()
    if leaving.why:
        raise leave(trainer.run.work.state, trainer.state.global_step, leaving.why, trainer.is_world_process_zero())
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _where(compute: Compute, processes: int) -> dict[str, Any]:
    on_cuda = compute.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(compute.device) if on_cuda else compute.device.type,
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }
