"""What happens before and after a packed training, the same for SFT and DPO: load, test, adapt; merge and save."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from snaketune.artifacts.manifest import write_json
from snaketune.config.runs import Lora, Quantization, Training
from snaketune.errors import SnaketuneError
from snaketune.models.devices import computing, weights_dtype
from snaketune.models.loading import add_lora, parameter_count
from snaketune.models.selftest import check_packed_equals_separate
from snaketune.packing.shards import PackedRows


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model ready to train.

    Attributes:
        model: with adapters, where there are any.
        kernel, dtype: how it computes.
        parameters: of the model without adapters.
        trainable: parameters that the training changes.
    """

    model: Any
    kernel: str
    dtype: torch.dtype
    parameters: int
    trainable: int

    def about(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {
            "kernel": self.kernel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
        }


def prepare(
    load: Callable[[torch.dtype], PreTrainedModel], rows: PackedRows, training: Training, lora: Lora | None
) -> Engine:
    """Load a model, show that packing doesn't change what it sees, and add adapters.

    Args:
        load: gives the model in a data type.
    """
    if not len(rows):
        raise SnaketuneError("there is no row to train on; lower the corpus' held_out, or look at what packing dropped")
    where, dtype, kernel = computing(training.precision)
    model = load(weights_dtype(dtype, frozen=lora is not None))
    if not getattr(model, "is_quantized", False):
        model = model.to(where)
    check_packed_equals_separate(model, rows, kernel, dtype)
    parameters = parameter_count(model)
    if lora:
        model = add_lora(model, lora)
        if training.gradient_checkpointing:
            model.enable_input_require_grads()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(
        f"model: {parameters / 1e6:.2f}M parameters, {trainable / 1e6:.2f}M of them trained; {where}, {dtype}, "
        f"kernel {kernel}; {len(rows)} rows of {rows.row_length} tokens",
        flush=True,
    )
    return Engine(model=model, kernel=kernel, dtype=dtype, parameters=parameters, trainable=trainable)


def save_trained(
    trainer: Trainer, folder: Path, quantization: Quantization | None, reload: Callable[[], PreTrainedModel]
) -> None:
    """Write a complete model folder; adapters are merged into the weights, 4-bit ones into a 16-bit copy of the base.

    Args:
        reload: gives the unquantized base, for merging.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "merge_and_unload"):
        adapter = folder / "adapter"
        model.save_pretrained(adapter)
        # Its README is a template with nothing filled in.
        (adapter / "README.md").unlink(missing_ok=True)
        _sort_target_modules(adapter / "adapter_config.json")
        if quantization:
            from peft import PeftModel

            model = PeftModel.from_pretrained(reload(), adapter)
        model = model.merge_and_unload()
    model.save_pretrained(folder)


def _sort_target_modules(path: Path) -> None:
    """peft keeps them in a set, which has another order in every process."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config.get("target_modules"), list):
        config["target_modules"] = sorted(config["target_modules"])
    write_json(path, config)
