"""Whether a training fits its machine, found before anything is loaded, from the config and the machine alone.

Facts in, findings out: what is certain stops the training, what may go well is told. Nothing here reads weights, runs a kernel
or prints; `examine`, which gathers the facts, measures what a CPU can do where that is in question.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from snaketune.config.operation import Execution
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.models.devices import Compute
from snaketune.models.machine import Machine, bitsandbytes_error, inspect_machine, resident_memory
from snaketune.models.memory import Estimate, Sharing, estimate
from snaketune.models.memory_trace import MicroBatch, TracedModel, trace_model
from snaketune.models.peak_flops import Peak, peak_of
from snaketune.packing.reader import PackedRows
from snaketune.stages.gpu_needs import ALLOW, Finding, needs_of_gpu
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.specs import DpoSpec, SftSpec

DAY = 24 * 3600
# From here on a training on a CPU is taken for an accident.
LONGEST_ON_CPU = 2 * DAY
# Of what a CPU does in matrix products, what a training reaches at best: 42 to 50% were measured (docs/LOG.md).
SHARE_OF_PEAK = 0.5
# FLOP/s that any core has, so that no peak is measured for what is short in any case.
SLOWEST = 1e10


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What is known of a training before its model is loaded.

    Attributes:
        planned: None where its config can't be made sense of without its weights.
    """

    machine: Machine
    planned: TracedModel | None
    estimate: Estimate | None
    findings: tuple[Finding, ...]

    @property
    def expected(self) -> str:
        """Of memory, for the line that a training begins with."""
        if self.estimate is None:
            return "memory unknown (this model's config can't be followed without its weights)"
        if self.estimate.expected is None:
            return f"at least {_gb(self.estimate.minimum)}"
        return f"{_gb(self.estimate.expected)} expected"


def _gb(size: int) -> str:
    """
    >>> _gb(680_000_000), _gb(61_000_000_000)
    ('0.68 GB', '61.0 GB')
    """
    return f"{size / 1e9:.{2 if size < 10e9 else 1}f} GB"


def examine(
    spec: SftSpec | DpoSpec,
    operation: Execution,
    compute: Compute,
    config: PretrainedConfig | None,
    rows: Any,
    *,
    dropout: bool = True,
    summed: bool = True,
    processes: int | None = None,
) -> Fitness:
    """Look at a training that is about to begin.

    Args:
        operation: with numbers in the place of `auto`.
        config: of its model, read or made; None where nobody knows.
        rows: that it trains on; of unpacked ones, neither how many tokens a batch has is known nor how many there are.
        dropout, summed: see `models.planned.trace_model` and `models.memory.estimate`.
        processes: that will train together; those that are there now where none are given.
    Raises:
        SnaketuneError: the adapters don't fit the model.
    """
    processes = processes or int(os.environ.get("WORLD_SIZE", 1))
    micro_batch = operation.micro_batch_rows
    packed = isinstance(rows, PackedRows)
    batch = MicroBatch(rows=micro_batch, row_length=rows.row_length, longest=rows.longest[0]) if packed else None
    planned = config and trace_model(config, compute, lora=spec.lora, batch=batch, dropout=dropout)
    machine = inspect_machine(compute)
    on_cpu = compute.device.type == "cpu"
    estimated = planned and estimate(
        planned,
        compute,
        spec.training.optimizer,
        quantization=spec.quantization,
        batch=batch,
        checkpointing=operation.gradient_checkpointing is True,
        summed=summed,
        accumulation=max(1, spec.training.batch_rows // (micro_batch * processes)),
        processes=processes,
        sharing=sharing_of(operation),
        already_used=resident_memory() if on_cpu else 0,
    )
    findings = _of_training(spec, operation, compute, machine)
    if estimated:
        here = operation.processes_per_node if on_cpu and processes > 1 else 1
        findings += too_small(estimated, machine, spec, processes, here)
    if planned and packed and on_cpu and not operation.allow_cpu:
        flops = planned.flops.per_token * rows.tokens * spec.training.epochs
        if flops > LONGEST_ON_CPU * SLOWEST:
            findings += too_slow(flops, processes, peak_of(compute))
    return Fitness(machine=machine, planned=planned, estimate=estimated, findings=tuple(findings))


def sharing_of(operation: Execution) -> Sharing:
    """What the processes of a training have a share of each."""
    if operation.launch == "deepspeed":
        return "zero3" if operation.zero_stage == 3 else "zero2"
    return "fsdp" if operation.launch == "fsdp" else "ddp"


def of_libraries(spec: Any, compute: Compute, machine: Machine) -> list[Finding]:
    """What is installed and doesn't work here, of what a stage that computes with a model uses."""
    return unloadable(machine, compute) + without_gpu_build(spec, compute)


def _of_training(spec: SftSpec | DpoSpec, operation: Execution, compute: Compute, machine: Machine) -> list[Finding]:
    found = of_libraries(spec, compute, machine)
    if machine.used_by_others:
        found.append(shared_gpu(machine))
    if compute.device.type != "cuda":
        found += needs_of_gpu(spec, operation)
        if operation.gpus and not operation.allow_cpu and (gpus := visible_gpus()):
            found.append(unusable_gpus(len(gpus)))
        if spec.quantization and compute.device.type != "cpu":
            found.append(
                Finding(
                    key="quantization",
                    found=f"4-bit weights can't be trained on {compute.device.type}",
                    do="take it out, or run it on a machine with a CUDA device",
                )
            )
    return found


def shared_gpu(machine: Machine) -> Finding:
    """A GPU that other processes compute on too."""
    return Finding(
        key="operation.gpus",
        found=f"other processes hold {machine.used_by_others / 1e9:.1f} of the {machine.memory / 1e9:.1f} GB of {machine.gpu}",
        do="speed is shared with them, and memory may run out as theirs grows; `nvidia-smi` lists them, and "
        "CUDA_VISIBLE_DEVICES names another GPU",
        certain=False,
    )


def unusable_gpus(count: int) -> Finding:
    """GPUs that the driver shows and torch doesn't find."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU"
    return Finding(
        key="operation.gpus",
        found=f"this job sees {count} GPU{'s' if count > 1 else ''}, and torch {torch.__version__}, built for {built}, can't "
        "use them",
        do="install a torch that goes with the driver (`nvidia-smi` tells its CUDA version), set gpus: 0, or allow it by "
        + ALLOW,
    )


def unloadable(machine: Machine, compute: Compute) -> list[Finding]:
    """Installed kernels that can't be had; the training takes the next one."""
    return [
        Finding(
            key="flash-attn",
            found=f"{kernel} is installed and doesn't load ({why})",
            do=f"attention runs on {compute.kernel}. To have it, install it again for torch {torch.__version__}: "
            + (
                "pip install --force-reinstall --no-build-isolation --no-deps flash-attn"
                if kernel == "flash_attention_2"
                else "pip install --force-reinstall --no-deps --pre flash-attn-4"
            ),
            certain=False,
        )
        for kernel, why in machine.broken_kernels
    ]


def without_gpu_build(spec: Any, compute: Compute) -> list[Finding]:
    """What bitsandbytes is asked for and can't do here."""
    training = getattr(spec, "training", None)
    optimizer = training.optimizer if training and OPTIMIZERS[training.optimizer].package == "bitsandbytes" else ""
    if not (spec.quantization or optimizer):
        return []
    trouble = bitsandbytes_error(compute.device)
    if not trouble:
        return []
    instead = "take quantization out" if spec.quantization else "take optimizer adamw_torch_fused"
    return [
        Finding(
            key="quantization" if spec.quantization else "training.optimizer",
            found=trouble,
            do=f"`python -m bitsandbytes` tells which build torch's CUDA {torch.version.cuda} needs (pip install --upgrade "
            f"bitsandbytes brings the usual ones), or {instead}",
        )
    ]


def too_small(estimated: Estimate, machine: Machine, spec: Any, processes: int, here: int = 1) -> list[Finding]:
    """A card, or a host, that can't hold the training, or may not.

    Args:
        processes: of the training.
        here: of these, those that share this memory.
    """
    least, whole = here * estimated.minimum, machine.memory
    where = machine.gpu or "this machine"
    if least > whole:
        return [
            Finding(
                key="training",
                found=f"needs {least / 1e9:.1f} GB before there is a single activation ({estimated}"
                + (f", in each of {here} processes" if here > 1 else "")
                + f"), and {where} has {whole / 1e9:.1f} GB",
                do=_smaller(spec, machine, processes),
            )
        ]
    expected = estimated.expected
    if expected is None or here * expected <= machine.free:
        return []
    return [
        Finding(
            key="training.micro_batch_rows",
            found=f"{here * expected / 1e9:.1f} GB are expected, and of {whole / 1e9:.1f} GB {machine.free / 1e9:.1f} are free",
            do="should they run out, the next attempt takes fewer rows at once, or recomputes activations",
            certain=False,
        )
    ]


def _smaller(spec: Any, machine: Machine, processes: int) -> str:
    if not machine.gpu:
        return f"run it on a machine with a GPU or with more memory, or train {'a smaller model' if spec.lora else 'by `lora`'}"
    ways = ["`quantization`" if spec.lora else "`lora`, alone or with `quantization`"] * (not spec.quantization)
    if not spec.lora and not OPTIMIZERS[spec.training.optimizer].for_gpus:
        ways.append("optimizer paged_adamw_8bit")
    return (
        f"use {', '.join([*ways, f'operation.launch: fsdp on more GPUs than {processes}'])}, or a card with more memory"
    )


def too_slow(flops: float, processes: int, peak: Peak) -> list[Finding]:
    """A training that a CPU works at for days."""
    seconds = flops / (processes * peak.flops_per_second * SHARE_OF_PEAK)
    if seconds <= LONGEST_ON_CPU:
        return []
    return [
        Finding(
            key="operation",
            found=f"on this CPU the training would take {seconds / DAY:,.0f} days at best ({flops:.1e} FLOPs, and half of the "
            f"{peak.flops_per_second / 1e9:,.0f} GFLOP/s of a {peak.source})",
            do=f"run it on a machine with a GPU, train a smaller model or fewer epochs, or allow it by {ALLOW}",
        )
    ]
