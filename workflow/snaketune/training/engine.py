"""A packed training from beginning to end, the same for SFT and DPO: load, test, adapt, train, merge and save."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, set_seed

from snaketune.artifacts.manifest import write_json
from snaketune.config.runs import Operation, Quantization
from snaketune.errors import SnaketuneError
from snaketune.models.devices import computing, weights_dtype
from snaketune.models.dropout import without_dropout
from snaketune.models.loading import add_lora, parameter_count
from snaketune.models.packable import check_config
from snaketune.models.selftest import self_test
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.checkpoints import copy_trained
from snaketune.training.trainer import PackedTrainer, fit, training_arguments

# Gives the model in a data type, quantized or not.
Load = Callable[[torch.dtype, Quantization | None], PreTrainedModel]


def train_packed(
    trainer_class: type[PackedTrainer],
    rows: PackedRows,
    spec: SftSpec | DpoSpec,
    operation: Operation,
    work: WorkFolder,
    load: Load,
    config: PretrainedConfig | None = None,
) -> Outcome:
    """Load a model, show that packing doesn't change what it sees, train it, and fill `work.payload` with it.

    Args:
        config: of the model that `load` gives; None where it is made from scratch.
    Raises:
        SnaketuneError: no rows, a model that can't see packed rows rightly, or a training that diverges.
    """
    if not len(rows):
        raise SnaketuneError("there is no row to train on; lower the corpus' held_out, or look at what packing dropped")
    set_seed(spec.training.seed)
    where, dtype, kernel = computing(spec.training.precision)
    if config:
        check_config(config, rows.longest[0], rows.has_prefixes)
    model = load(weights_dtype(dtype, frozen=spec.lora is not None), spec.quantization)
    if not spec.quantization:
        model = model.to(where)
    parameters = parameter_count(model)
    with nullcontext() if trainer_class.drops_out else without_dropout(model):
        tested = self_test(model, [rows], kernel, dtype, training=True)
        if spec.lora:
            model = add_lora(model, spec.lora)
            if spec.training.gradient_checkpointing:
                model.enable_input_require_grads()
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(
            f"model: {parameters / 1e6:.2f}M parameters, {trainable / 1e6:.2f}M of them trained; {where}, {dtype}, "
            f"kernel {kernel}; {len(rows)} rows of {rows.row_length} tokens",
            flush=True,
        )
        checkpoints = work.state / "checkpoints"
        trainer = trainer_class(
            model=model,
            args=training_arguments(spec.training, operation, checkpoints, len(EqualTokens(rows))),
            rows=rows,
            kernel=kernel,
            parameters=parameters,
        )
        run = fit(trainer, checkpoints)
    if trainer.is_world_process_zero():
        save_trained(trainer, work.payload, spec, lambda: load(torch.bfloat16, None))
    return Outcome(
        counts={"rows": len(rows), "tokens_per_epoch": rows.tokens, "steps": trainer.state.global_step},
        about=tested.about() | {"parameters": parameters, "trainable_parameters": trainable},
        run=run | {"self_test_share": tested.share},
    )


def save_trained(
    trainer: Trainer, folder: Path, spec: SftSpec | DpoSpec, reload: Callable[[], PreTrainedModel]
) -> None:
    """Write a complete model folder; adapters are merged into the weights, 4-bit ones into a 16-bit copy of the base.

    Args:
        reload: gives the unquantized base, for merging.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if spec.lora:
        adapter = folder / "adapter"
        model.save_pretrained(adapter)
        # Its README is a template with nothing filled in.
        (adapter / "README.md").unlink(missing_ok=True)
        _sort_target_modules(adapter / "adapter_config.json")
        if spec.quantization:
            model = copy_trained(model, add_lora(reload(), spec.lora))
        model = model.merge_and_unload()
    model.save_pretrained(folder)


def _sort_target_modules(path: Path) -> None:
    """peft keeps them in a set, which has another order in every process."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(path, config)
