"""In what plan a device computes an optimizer step: rows per forward pass, and whether activations are recomputed.

`batch_rows` is what the user fixes and what shapes the weights; how many rows are computed at once moves sums in their last
bits, and which of a model's inputs dropout hits. So the plan are in no fingerprint. They are chosen before the processes
start: what an earlier attempt of this very job began with, else what the config says, else what `calibrate` found. Where memory
runs out all the same, the next smaller_plan ones are written beside the checkpoints, and the next attempt takes them.

    state/plan.json    what was requested for, and what is taken
    state/ran_out.json     written by a process that ran out of memory: in which step, and why
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import write_json
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.host.gpus import gpu_model, visible_gpus
from snaketune.stages.job import result_at

FILE, RAN_OUT = "plan.json", "ran_out.json"
CURVE = "curve.json"
# Where nobody measured and nobody chose.
DEFAULT_MICRO_BATCH_ROWS = 8
# A choice by hand that loses more than this is told, in percent.
REPORTED_SLOWDOWN = 10


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Rows of a forward pass on one device, and whether the backward pass recomputes activations."""

    micro_batch_rows: int
    gradient_checkpointing: bool

    def __str__(self) -> str:
        rows = f"micro-batches of {self.micro_batch_rows} row{'s' if self.micro_batch_rows > 1 else ''}"
        return f"{rows}, activations recomputed" if self.gradient_checkpointing else rows

    def apply_to(self, operation: Execution) -> Execution:
        """The operation with these in the place of what was requested for."""
        return operation.model_copy(update=asdict(self))

    @classmethod
    def from_operation(cls, operation: Execution) -> "BatchPlan":
        """What `apply_to` put there."""
        return cls(
            micro_batch_rows=operation.micro_batch_rows, gradient_checkpointing=operation.gradient_checkpointing is True
        )


def divisors(batch_rows: int, processes: int) -> list[int]:
    """Rows that a process can compute at once, so that every step has whole plan; ascending.

    >>> divisors(24, 2)
    [1, 2, 3, 4, 6, 12]

    Raises:
        SnaketuneError: the processes can't share a step's rows equally.
    """
    if batch_rows % processes:
        raise SnaketuneError(
            f"training.batch_rows: {batch_rows} rows can't be shared by {processes} processes; expected a multiple of "
            f"{processes}"
        )
    own = batch_rows // processes
    return [rows for rows in range(1, own + 1) if own % rows == 0]


def choose(operation: Execution, batch_rows: int, processes: int, state: Path) -> BatchPlan:
    """The plan of this attempt, which are kept in `state` for the next one.

    Raises:
        SnaketuneError: the rows of a step can't be divided so.
    """
    possible, requested = divisors(batch_rows, processes), _requested(operation)
    kept = _read(state / FILE)
    curve = read_curve(operation)
    if kept and kept["requested"] == requested and kept["micro_batch_rows"] in possible:
        chosen = BatchPlan(**{name: kept[name] for name in requested})
    else:
        chosen = _configured_plan(operation, possible, processes, batch_rows) or _fastest_measured(
            operation, possible, curve
        )
        save_plan(state, operation, chosen)
    if curve and (told := slowdown_note(chosen, curve)):
        print(told, flush=True)
    return chosen


def save_plan(state: Path, operation: Execution, plan: BatchPlan) -> None:
    """For the next attempt, as long as the config asks for the same."""
    write_json(state / FILE, {"requested": _requested(operation)} | asdict(plan))


def smaller_plan(plan: BatchPlan, operation: Execution, batch_rows: int, processes: int) -> BatchPlan | None:
    """What needs less memory next: fewer rows at once; with one row, recomputed activations unless the config forbids it.

    >>> smaller_plan(BatchPlan(micro_batch_rows=4, gradient_checkpointing=False), Execution(), 12, 1)
    BatchPlan(micro_batch_rows=3, gradient_checkpointing=False)
    """
    fewer = [rows for rows in divisors(batch_rows, processes) if rows < plan.micro_batch_rows]
    if fewer:
        return BatchPlan(micro_batch_rows=fewer[-1], gradient_checkpointing=plan.gradient_checkpointing)
    if operation.gradient_checkpointing == "auto" and not plan.gradient_checkpointing:
        return BatchPlan(micro_batch_rows=plan.micro_batch_rows, gradient_checkpointing=True)
    return None


def record_out_of_memory(state: Path, step: int | None, error: BaseException) -> None:
    """Called in a process whose memory ran out. Args: step: None before the first one."""
    write_json(state / RAN_OUT, {"step": step, "why": str(error).strip().partition("\n")[0]})


def out_of_memory_error(
    plan: BatchPlan, operation: Execution, batch_rows: int, processes: int, state: Path
) -> SnaketuneError | None:
    """If a process ran out of memory: the error that says so; the next smaller_plan plan are written for the next attempt."""
    told = _read(state / RAN_OUT)
    if told is None:
        return None
    (state / RAN_OUT).unlink()
    if told["step"] is None:
        return SnaketuneError(
            f"out of memory before the first step ({told['why']}): the model itself doesn't fit; use `lora` with "
            "`quantization`, or operation.launch: fsdp on more GPUs"
        )
    what = f"out of memory in step {told['step']} with {plan} ({told['why']})"
    following = smaller_plan(plan, operation, batch_rows, processes)
    if following is None:
        return SnaketuneError(
            f"{what}, and there is nothing smaller_plan; "
            + ("set training.gradient_checkpointing: auto, or " * (not plan.gradient_checkpointing))
            + "smaller_plan packing.length, use `lora`, or operation.launch: fsdp on more GPUs"
        )
    save_plan(state, operation, following)
    return SnaketuneError(
        f"{what}. The next attempt goes on from the last checkpoint with {following} and the same {batch_rows} rows per "
        "step: run again (with `--retries 3` Snakemake does so by itself)"
    )


def read_curve(operation: Execution) -> dict[str, Any] | None:
    """What `calibrate` measured for runs like this one; None where nobody did."""
    manifest = Path(operation.calibration)
    if not operation.calibration or not manifest.is_file():
        return None
    try:
        curve = json.loads(result_at(manifest).file(CURVE).read_text(encoding="utf-8"))
        if curve.keys() >= {"device", "trials", "best"}:
            return _if_same_device(curve, operation)
        told = f"{CURVE} lacks {', '.join(sorted({'device', 'trials', 'best'} - curve.keys()))}"
    except (SnaketuneError, OSError, ValueError, AttributeError) as error:
        told = str(error)
    # It only says how to run, and nothing fails for want of it.
    print(f"note: what calibrate measured can't be read ({told}) and counts as not measured", flush=True)
    return None


def matching_trial(plan: BatchPlan, curve: dict[str, Any]) -> dict[str, Any] | None:
    """What was measured with these plan, if they fitted."""
    return next((one for one in curve["trials"] if one["fits"] and asdict(plan).items() <= one.items()), None)


def slowdown_percent(plan: BatchPlan, curve: dict[str, Any]) -> float | None:
    """By how much slower these plan are than the best found; None where they weren't measured."""
    found, best = matching_trial(plan, curve), curve["best"]
    if found is None or best is None:
        return None
    return round(100 * (1 - found["tokens_per_second"] / best["tokens_per_second"]), 1)


def slowdown_note(plan: BatchPlan, curve: dict[str, Any]) -> str:
    """A line where a choice loses much; empty where it doesn't."""
    lost = slowdown_percent(plan, curve)
    if lost is None or lost <= REPORTED_SLOWDOWN:
        return ""
    best = BatchPlan(**{name: curve["best"][name] for name in asdict(plan)})
    return (
        f"note: {plan} lose {lost:.0f}% of the speed found with {best} on {curve['device']}; "
        "`training.micro_batch_rows: auto` takes those"
    )


def _if_same_device(curve: dict[str, Any], operation: Execution) -> dict[str, Any] | None:
    here = (gpu_model(),) if operation.gpus and visible_gpus() else ("cpu", "mps")
    if curve["device"] in here or here == ("",):
        return curve
    print(
        f"note: what calibrate measured is of {curve['device']}, here is {here[0]}, so it isn't taken; "
        "`snakemake --forcerun calibrate` measures anew",
        flush=True,
    )
    return None


def _requested(operation: Execution) -> dict[str, Any]:
    return {
        "micro_batch_rows": operation.micro_batch_rows,
        "gradient_checkpointing": operation.gradient_checkpointing,
    }


def _configured_plan(operation: Execution, possible: list[int], processes: int, batch_rows: int) -> BatchPlan | None:
    rows = operation.micro_batch_rows
    if rows == "auto":
        return None
    if rows not in possible:
        raise SnaketuneError(
            f"training.micro_batch_rows: {batch_rows} rows of a step can't be divided into micro-batches of {rows} on "
            f"{processes} processes; expected {', '.join(map(str, possible))} or `auto`"
        )
    return BatchPlan(micro_batch_rows=rows, gradient_checkpointing=operation.gradient_checkpointing is True)


def _fastest_measured(operation: Execution, possible: list[int], curve: dict[str, Any] | None) -> BatchPlan:
    requested = operation.gradient_checkpointing
    trials = [
        one
        for one in (curve["trials"] if curve else ())
        if one["fits"] and one["micro_batch_rows"] in possible and requested in ("auto", one["gradient_checkpointing"])
    ]
    if not trials:
        rows = max(rows for rows in possible if rows <= DEFAULT_MICRO_BATCH_ROWS)
        print(f"micro_batch_rows: auto, and nothing was measured for such runs: {rows} is a guess", flush=True)
        return BatchPlan(micro_batch_rows=rows, gradient_checkpointing=requested is True)
    found = best_of(trials)
    return BatchPlan(micro_batch_rows=found["micro_batch_rows"], gradient_checkpointing=found["gradient_checkpointing"])


# Trials whose speeds differ by less are alike; then the one that needs less memory is better.
SPEED_TOLERANCE = 0.02


def best_of(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest trial, or one that is as good as that and needs less memory."""
    fastest = max(one["tokens_per_second"] for one in trials)
    alike = [one for one in trials if one["tokens_per_second"] >= (1 - SPEED_TOLERANCE) * fastest]
    return min(alike, key=lambda one: (one["peak_bytes"], one["micro_batch_rows"]))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A power cut can leave an empty one.
        return None
