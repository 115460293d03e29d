"""Check that a training fits its machine before a model is loaded, from the config and the properties of the machine.

The functions return findings: certain ones stop the training, others are logged as warnings. Nothing here reads weights or
prints. Only `check_machine` may run a kernel: it measures the peak FLOP/s of a CPU if a training looks long.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.config.operation import Execution
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.engine.model.device_speed import Peak, peak_of
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.machine import Machine, bitsandbytes_error, inspect_machine, resident_memory
from snaketune.engine.packing.rows import PackedRows
from snaketune.models.memory import Estimate, Sharing, estimate
from snaketune.models.traced_model import MicroBatch, TracedModel, trace_model
from snaketune.stages.findings import Finding
from snaketune.stages.host.gpus import ALLOW, gpu_findings, visible_gpus
from snaketune.stages.specs import TrainingSpec

DAY = 24 * 3600
# A training on a CPU that is expected to take longer is refused, as probably unintended.
MAX_CPU_SECONDS = 2 * DAY
# Share of a CPU's matrix-product FLOP/s that a training reaches at best; 42 to 50% were measured (docs/LOG.md).
SHARE_OF_PEAK = 0.5
# A lower bound of any core's FLOP/s: the peak isn't measured for trainings that are short even at this rate.
MIN_FLOPS_PER_SECOND = 1e10
REINSTALL = "pip install --force-reinstall --no-deps --pre flash-attn-4"
REINSTALL_2 = "pip install --force-reinstall --no-build-isolation --no-deps flash-attn"


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    """Result of `check_machine`: the machine, shapes and FLOPs of the model and its estimated memory (None if its config
    isn't enough to build it without weights), and findings."""

    machine: Machine
    planned: TracedModel | None
    estimate: Estimate | None
    findings: tuple[Finding, ...]

    @property
    def expected(self) -> str:
        """Expected memory, for the first log line of a training."""
        if self.estimate is None:
            return "memory unknown (this model can't be built from its config without weights)"
        if self.estimate.expected is None:
            return f"at least {_gb(self.estimate.minimum)}"
        return f"{_gb(self.estimate.expected)} expected"


def _gb(size: int) -> str:
    """Format bytes as GB.

    >>> _gb(680_000_000), _gb(61_000_000_000)
    ('0.68 GB', '61.0 GB')
    """
    return f"{size / 1e9:.{2 if size < 10e9 else 1}f} GB"


def check_machine(
    spec: TrainingSpec,
    operation: Execution,
    compute: Compute,
    config: PretrainedConfig | None,
    rows: Any,
    *,
    dropout: bool = True,
    summed: bool = True,
    trained_model: Callable[[PreTrainedModel, int], PreTrainedModel] | None = None,
) -> MachineCheck:
    """Check the memory, libraries, devices and expected duration of a training on `rows`; if they aren't packed, the tokens
    of a batch and the duration are unknown; without a config, memory too. `auto` in `operation` is resolved to numbers.

    For `dropout` and `trained_model` see `trace_model`, for `summed` see `estimate`. SnaketuneError: `lora` names modules that
    the model doesn't have.
    """
    processes, micro_batch, on_cpu = operation.processes, operation.micro_batch_rows, compute.device.type == "cpu"
    packed = isinstance(rows, PackedRows)
    row_length = rows.row_length if packed else 0
    if packed and compute.kernel == SEPARATE:
        # Prompts are computed with each completion.
        row_length += int(rows.values("prefix_lengths").sum(dtype="int64")) // max(1, len(rows))
    batch = MicroBatch(rows=micro_batch, row_length=row_length, longest=rows.longest[0]) if packed else None
    learned = {"lora": spec.lora, "trainable": spec.training.trainable}
    traced = {"dropout": dropout, "trained_model": trained_model}
    planned = config and trace_model(config, compute, **learned, batch=batch, **traced)
    machine = inspect_machine(compute)
    estimated = planned and estimate(
        planned,
        compute,
        spec.training.optimizer,
        quantization=spec.quantization,
        # Of offloaded activations, about as much is on the device at a time as of recomputed ones.
        checkpointing=operation.gradient_checkpointing is True or (operation.activation_offloading and not on_cpu),
        summed=summed,
        distilled=bool(getattr(spec, "distill", None)),
        accumulation=max(1, spec.training.batch_rows // (micro_batch * processes)),
        averaged=spec.training.average is not None,
        processes=processes,
        sharing=sharing_mode(operation),
        already_used=resident_memory() if on_cpu else 0,
    )
    findings = [*_device_findings(spec, operation, compute, machine), *_adapter_findings(planned, config)]
    if estimated:
        here = operation.processes_per_node if on_cpu else 1
        findings += memory_findings(estimated, machine, spec, processes, here)
    if planned and packed and on_cpu and not operation.allow_cpu:
        flops = planned.flops.per_token * rows.tokens * spec.training.epochs
        if flops > MAX_CPU_SECONDS * MIN_FLOPS_PER_SECOND:
            findings += duration_findings(flops, processes, peak_of(compute))
    return MachineCheck(machine=machine, planned=planned, estimate=estimated, findings=tuple(findings))


def sharing_mode(operation: Execution) -> Sharing:
    """Return how the processes of a training share the model, in the terms of `models.memory.estimate`."""
    modes = {"deepspeed": "zero3" if operation.zero_stage == 3 else "zero2", "fsdp": "fsdp"}
    return modes.get(operation.launch, "ddp")


def library_findings(spec: Any, compute: Compute, machine: Machine) -> Iterator[Finding]:
    """Findings about installed libraries that don't work on this machine, for any stage that runs a model: attention kernels
    that fail to load (another one is used), and bitsandbytes where quantization or the optimizer needs it."""
    for kernel, why in machine.broken_kernels:
        yield Finding(
            key="flash-attn",
            problem=f"{kernel} is installed but fails to load ({why})",
            do=f"attention uses {compute.kernel} instead. To use it, reinstall it for torch {torch.__version__}: "
            + (REINSTALL_2 if kernel == "flash_attention_2" else REINSTALL),
            certain=False,
        )
    training = getattr(spec, "training", None)
    needed = spec.quantization or (training and OPTIMIZERS[training.optimizer].package == "bitsandbytes")
    if needed and (trouble := bitsandbytes_error(compute.device)):
        instead = "remove quantization" if spec.quantization else "use optimizer adamw_torch_fused"
        yield Finding(
            key="quantization" if spec.quantization else "training.optimizer",
            problem=trouble,
            do=f"`python -m bitsandbytes` shows which build torch's CUDA {torch.version.cuda} needs (pip install --upgrade "
            f"bitsandbytes installs the usual ones), or {instead}",
        )


def _device_findings(spec: TrainingSpec, operation: Execution, compute: Compute, machine: Machine) -> Iterator[Finding]:
    yield from library_findings(spec, compute, machine)
    if machine.used_by_others:
        yield Finding(
            key="operation.gpus",
            problem=f"other processes use {machine.used_by_others / 1e9:.1f} of the {machine.memory / 1e9:.1f} GB of "
            f"{machine.gpu}",
            do="they slow the training down, and memory may run out as they grow; `nvidia-smi` lists them, and "
            "CUDA_VISIBLE_DEVICES selects another GPU",
            certain=False,
        )
    if compute.device.type == "cuda":
        return
    yield from gpu_findings(spec, operation)
    if operation.gpus and not operation.allow_cpu and (gpus := visible_gpus()):
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU"
        yield Finding(
            key="operation.gpus",
            problem=f"this job sees {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, and torch {torch.__version__}, built for "
            f"{built}, can't use them",
            do="install a torch that matches the driver (`nvidia-smi` shows its CUDA version), set gpus: 0, or allow it by "
            + ALLOW,
        )
    if spec.quantization and compute.device.type != "cpu":
        yield Finding(
            key="quantization",
            problem=f"4-bit weights can't be trained on {compute.device.type}",
            do="remove it, or run on a machine with a CUDA device",
        )


def _adapter_findings(planned: TracedModel | None, config: PretrainedConfig | None) -> Iterator[Finding]:
    """Finding that `all-linear` has adapters on fewer layers than it says."""
    if planned and planned.without_adapters:
        missed = ", ".join(planned.without_adapters)
        yield Finding(
            key="lora.target_modules",
            problem=f"{missed}: peft adds no adapters to these layers of {config.model_type}, so they stay as they are",
            do=f"lora.modules_to_save: [{missed}] trains them in full; ignore this if the other layers are enough",
            certain=False,
        )


def memory_findings(
    estimated: Estimate, machine: Machine, spec: Any, processes: int, here: int = 1
) -> Iterator[Finding]:
    """Finding that the training doesn't fit in the memory of the GPU or the host (certain), or may not fit (possible),
    which `here` of its processes share."""
    least, whole, expected = here * estimated.minimum, machine.memory, estimated.expected
    if least > whole:
        yield Finding(
            key="training",
            problem=f"needs {least / 1e9:.1f} GB without any activations ({estimated}"
            + (f", in each of {here} processes" if here > 1 else "")
            + f"), and {machine.gpu or 'this machine'} has {whole / 1e9:.1f} GB",
            do=_memory_advice(spec, machine, processes),
        )
    elif expected is not None and here * expected > machine.free:
        yield Finding(
            key="training.micro_batch_rows",
            problem=f"needs about {here * expected / 1e9:.1f} GB, and {machine.free / 1e9:.1f} of {whole / 1e9:.1f} GB are "
            "free",
            do="if memory runs out, the next attempt uses smaller micro-batches or gradient checkpointing",
            certain=False,
        )


def _memory_advice(spec: Any, machine: Machine, processes: int) -> str:
    if not machine.gpu:
        return f"run it on a machine with a GPU or with more memory, or train {'a smaller model' if spec.lora else 'by `lora`'}"
    ways = []
    if not spec.quantization:
        ways.append("`quantization`" if spec.lora else "`lora`, alone or with `quantization`")
    if not spec.lora and not OPTIMIZERS[spec.training.optimizer].for_gpus:
        ways.append("optimizer paged_adamw_8bit")
    ways.append(f"operation.launch: fsdp on more GPUs than {processes}")
    return f"use {', '.join(ways)}, or a card with more memory"


def shortest_seconds(flops: float, processes: int, peak: Peak) -> float:
    """Seconds that a training takes at best."""
    return flops / (processes * peak.flops_per_second * SHARE_OF_PEAK)


def duration_findings(flops: float, processes: int, peak: Peak) -> Iterator[Finding]:
    """Finding that a training would take longer than MAX_CPU_SECONDS on this CPU."""
    seconds = shortest_seconds(flops, processes, peak)
    if seconds > MAX_CPU_SECONDS:
        yield Finding(
            key="operation",
            problem=f"on this CPU the training would take {seconds / DAY:,.0f} days at best ({flops:.1e} FLOPs, and half of "
            f"the {peak.flops_per_second / 1e9:,.0f} GFLOP/s of a {peak.source})",
            do=f"run it on a machine with a GPU, train a smaller model or fewer epochs, or allow it by {ALLOW}",
        )
