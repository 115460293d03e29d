"""The batch plan: how a device computes an optimizer step, in micro-batches of how many rows, with or without gradient
checkpointing.

It changes only the last bits of sums and which inputs dropout zeroes, so it isn't part of a fingerprint. It is chosen before
the processes start: the plan of an earlier attempt of the same job, else the config's values, else the fastest that `calibrate`
measured. If memory runs out anyway, half the rows are stored, and the next attempt uses them.

    state/batch_plan.json       the requested values and the plan in use
    state/out_of_memory.json    when and why memory ran out, written by the process; by the launcher if the kernel killed that
    state/in_steps              exists once the processes of an attempt take steps
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError, first_line
from snaketune.files import write_json
from snaketune.stages.host.gpus import gpu_model, visible_gpus
from snaketune.stages.job import result_at

FILE, OUT_OF_MEMORY, IN_STEPS = "batch_plan.json", "out_of_memory.json", "in_steps"
CURVE = "curve.json"
# At most so many rows if the config has `auto` and nothing was measured. A CPU has few idle units to fill (docs/benchmarks.md).
DEFAULT_MICRO_BATCH_ROWS, DEFAULT_ON_CPU = 8, 2
# In percent. A configured plan that is slower than the best one by more is reported.
REPORTED_SLOWDOWN = 10


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Rows per forward pass on one device, and whether the backward pass recomputes activations."""

    micro_batch_rows: int
    gradient_checkpointing: bool

    def __str__(self) -> str:
        rows = f"micro-batches of {self.micro_batch_rows} row{'s' if self.micro_batch_rows > 1 else ''}"
        return f"{rows}, activations recomputed" if self.gradient_checkpointing else rows

    def apply_to(self, operation: Execution) -> Execution:
        """The operation with the values of this plan."""
        return operation.model_copy(update=asdict(self))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "BatchPlan":
        """The plan of a trial, of a stored one, or of the values of an operation; `auto` recomputes nothing."""
        recomputes = values["gradient_checkpointing"] is True
        return cls(micro_batch_rows=values["micro_batch_rows"], gradient_checkpointing=recomputes)


def _requested(operation: Execution) -> dict[str, Any]:
    return operation.model_dump(include={"micro_batch_rows", "gradient_checkpointing"})


def halved(rows: int, share: int) -> int:
    """The largest number of rows up to half of `rows` that divides `share`; 0 if there is none.

    >>> halved(12, 12), halved(6, 12), halved(3, 12), halved(1, 12)
    (6, 3, 1, 0)
    """
    return next((half for half in range(rows // 2, 0, -1) if share % half == 0), 0)


def default_rows(share: int, *, on_cpu: bool) -> int:
    """Rows per micro-batch where nothing was measured."""
    return halved(2 * (DEFAULT_ON_CPU if on_cpu else DEFAULT_MICRO_BATCH_ROWS), share)


def choose_plan(operation: Execution, batch_rows: int, processes: int, state: Path) -> BatchPlan:
    """Choose the batch plan of this attempt, and store it in `state` for the next one."""
    share, previous, curve = batch_rows // processes, _read(state / FILE), read_curve(operation)
    if previous and previous["requested"] == _requested(operation) and share % previous["micro_batch_rows"] == 0:
        chosen = BatchPlan.of(previous)
    else:
        auto = operation.micro_batch_rows == "auto"
        chosen = _measured(operation, share, curve) if auto else BatchPlan.of(vars(operation))
        save_plan(state, operation, chosen)
    slowdown = curve and slowdown_percent(chosen, curve)
    if slowdown and slowdown > REPORTED_SLOWDOWN:
        print(
            f"note: throughput with {chosen} is {slowdown:.0f}% lower than with {BatchPlan.of(curve['best'])} on "
            f"{curve['device']}; `training.micro_batch_rows: auto` chooses the latter",
            flush=True,
        )
    return chosen


def _measured(operation: Execution, share: int, curve: dict[str, Any] | None) -> BatchPlan:
    """The fastest plan that was measured, else the default of the calibration, else of the device."""
    if known := curve and (curve["best"] or curve.get("default")):
        return BatchPlan.of(known)
    rows = default_rows(share, on_cpu=not (operation.gpus and visible_gpus()))
    why = "this training is too short for a trial" if curve else "there is no calibration for this run"
    print(f"micro_batch_rows: auto, and {why}: using {rows}, unmeasured", flush=True)
    return BatchPlan(micro_batch_rows=rows, gradient_checkpointing=operation.gradient_checkpointing is True)


def save_plan(state: Path, operation: Execution, plan: BatchPlan) -> None:
    """Store the plan for the next attempt, which uses it if the config's values are still the same."""
    write_json(state / FILE, {"requested": _requested(operation)} | asdict(plan))


def smaller_plan(plan: BatchPlan, operation: Execution, batch_rows: int, processes: int) -> BatchPlan | None:
    """The next plan that needs less memory: half the rows; at one row, gradient checkpointing if the config has `auto`; else
    None."""
    if rows := halved(plan.micro_batch_rows, batch_rows // processes):
        return BatchPlan(micro_batch_rows=rows, gradient_checkpointing=plan.gradient_checkpointing)
    if operation.gradient_checkpointing == "auto" and not plan.gradient_checkpointing:
        return BatchPlan(micro_batch_rows=plan.micro_batch_rows, gradient_checkpointing=True)
    return None


def record_out_of_memory(state: Path, step: int | None, error: BaseException) -> None:
    """Record for its launcher that this process ran out of memory in a step; None before the first one."""
    write_json(state / OUT_OF_MEMORY, {"when": step and f"step {step}", "why": first_line(error), "killed": False})


def record_killed(state: Path, why: str) -> None:
    """Record that the kernel killed a process of this attempt since the memory of the host ran out."""
    write_json(state / OUT_OF_MEMORY, {"when": "a step" if takes_steps(state) else None, "why": why, "killed": True})


def takes_steps(state: Path) -> bool:
    """Whether the processes of the last attempt came to take steps: how much memory these need depends on the batch plan."""
    return (state / IN_STEPS).is_file()


def steps_use_host(operation: Execution) -> bool:
    """Whether the host's memory holds the activations of a step."""
    return bool(operation.activation_offloading) or not (operation.gpus and visible_gpus())


def out_of_memory_error(
    plan: BatchPlan, operation: Execution, batch_rows: int, processes: int, state: Path
) -> SnaketuneError | None:
    """The error to raise if a process recorded that it ran out of memory, or the kernel killed it for that; else None. Stores
    the next smaller plan, if any."""
    record = _read(state / OUT_OF_MEMORY)
    if record is None:
        return None
    (state / OUT_OF_MEMORY).unlink()
    on_gpu, more = operation.gpus and visible_gpus(), "give the job more memory, or " if record["killed"] else ""
    if record["when"] is None:
        return SnaketuneError(
            f"out of memory before the first step ({record['why']}): the model itself doesn't fit; {more}use `lora` with "
            "`quantization`, or operation.launch: fsdp on more GPUs"
        )
    what = f"out of memory in {record['when']} with {plan} ({record['why']})"
    if record["killed"] and not steps_use_host(operation):
        return SnaketuneError(
            f"{what}: of the host, where smaller micro-batches on a GPU need as much; give the job more memory, or set "
            "operation.load_in_memory: false"
        )
    smaller = smaller_plan(plan, operation, batch_rows, processes)
    if smaller is None:
        return SnaketuneError(
            f"{what}, and there is no smaller batch plan; {more}"
            + ("set training.gradient_checkpointing: auto, or " * (not plan.gradient_checkpointing))
            + "set operation.activation_offloading: true, or " * bool(on_gpu and not operation.activation_offloading)
            + "lower packing.length, use `lora`, or operation.launch: fsdp on more GPUs"
        )
    save_plan(state, operation, smaller)
    return SnaketuneError(
        f"{what}. The next attempt (run again, or use `--retries 3`) resumes from the last checkpoint with {smaller} and the "
        f"same {batch_rows} rows per step"
    )


def read_curve(operation: Execution) -> dict[str, Any] | None:
    """The curve that `calibrate` measured for this run on this kind of device; None if there is none or it can't be read."""
    manifest = Path(operation.calibration)
    if not operation.calibration or not manifest.is_file():
        return None
    try:
        curve = json.loads(result_at(manifest).file(CURVE).read_text(encoding="utf-8"))
    except (SnaketuneError, OSError, ValueError) as error:
        # The curve affects speed only, so a training runs without it.
        print(f"note: the calibration can't be read ({error}) and is ignored", flush=True)
        return None
    here = (gpu_model(),) if operation.gpus and visible_gpus() else ("cpu", "mps")
    if curve["device"] in here or here == ("",):
        return curve
    print(
        f"note: the calibration was measured on {curve['device']}, this device is {here[0]}, so it is ignored; "
        "`snakemake --forcerun calibrate` measures again",
        flush=True,
    )
    return None


def slowdown_percent(plan: BatchPlan, curve: dict[str, Any]) -> float | None:
    """Percentage by which the throughput of a plan is lower than that of the best one; None if it wasn't measured."""
    trial = next((trial for trial in curve["trials"] if trial["fits"] and BatchPlan.of(trial) == plan), None)
    if trial is None or curve["best"] is None:
        return None
    return round(100 * (1 - trial["tokens_per_second"] / curve["best"]["tokens_per_second"]), 1)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A power failure can leave an empty file.
        return None
