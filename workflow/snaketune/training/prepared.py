"""Trainings before their models are loaded: what they are, how they run, on which rows, from which weights."""

from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.operation import Execution
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.fsdp import world_size
from snaketune.engine.model.devices import Compute, resolve_compute
from snaketune.engine.model.packing_support import choose_kernel
from snaketune.engine.packing.rows import PackedRows
from snaketune.models.adapter_stack import AdapterStack
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.specs import TrainingSpec
from snaketune.tracking.curves import TrackedRun

OFFLOADING_DEVICES = ("cuda", "xpu")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a training is, and how it runs.

    Attributes:
        operation: with every `auto` resolved.
        adapter: folder of the adapter that is trained further; None if there is none.
    """

    spec: TrainingSpec
    operation: Execution
    work: WorkFolder
    compute: Compute
    tracked: TrackedRun | None = None
    adapter: Path | None = None

    @classmethod
    def of(cls, spec: TrainingSpec, operation: Execution, work: WorkFolder, tracked: TrackedRun | None = None) -> Self:
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
    def checkpoints(self) -> Path:
        return self.work.state / "checkpoints"

    @property
    def best(self) -> Path:
        """The folder of the weights of the best measurements."""
        return self.work.state / "best"


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A training with its rows and its initial model, before that is loaded; all that `pipeline` needs.

    Attributes:
        rows: training rows, as the trainer takes them; `str(rows)` describes them in the log.
        held_out: rows that may be measured while the training runs; None if it can't measure any.
        loss: the arguments of the trainer that define its loss.
    """

    trainer_class: type[TrainingFeatures]
    rows: Sized
    run: TrainingRun
    initial: AdapterStack
    loss: dict[str, Any]
    held_out: PackedRows | None = None

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """The config of the initial model; None for a model from scratch."""
        return self.initial.config()

    @property
    def any_config(self) -> PretrainedConfig | None:
        """The config of the initial model, also if that is made from scratch."""
        return self.config or self.initial.new_config()

    def load(self, weights_dtype: torch.dtype, quantized: bool = True) -> PreTrainedModel:
        """Load the model that is trained. Args: quantized: whether its weights are in 4 bits where the spec has them so."""
        quantization = self.run.spec.quantization if quantized else None
        loaded = self.initial.load(weights_dtype, quantization)
        return self.trainer_class.trained_model(loaded, self.run.spec.training.seed)

    def with_kernel(self) -> Self:
        """Return the training with the kernel for its model and packed rows; see `packing_support.choose_kernel`."""
        longest, prefixes, dropout = self.rows.longest[0], self.rows.has_prefixes, self.trainer_class.drops_out
        compute = choose_kernel(self.run.compute, self.any_config, longest, prefixes=prefixes, dropout=dropout)
        return replace(self, run=replace(self.run, compute=compute))
