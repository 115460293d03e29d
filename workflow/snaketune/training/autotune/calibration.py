"""Measure the throughput of batch plans on this device: the work of the `calibrate` stage, in launched processes.

Trials are short trainings on real rows. They begin with one row per micro-batch and increase it until memory runs out or
throughput stops growing; if memory was the limit, they are repeated with gradient checkpointing. The rows of an optimizer step
stay the same, so the choice doesn't change what is learned. Measured times vary, so `curve.json` isn't reproducible; it isn't
part of any training's fingerprint.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import gather_object

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError, first_line
from snaketune.models.adapter_stack import AdapterStack
from snaketune.models.device_speed import peak_of
from snaketune.models.machine import host_memory_limit, is_out_of_memory, reset_peak_memory
from snaketune.packing.reader import EqualTokens, PackedRows
from snaketune.packing.shards import FORMAT_VERSIONS
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CalibrateSpec, SftSpec
from snaketune.training.autotune.batch_plan import (
    CURVE,
    OUT_OF_MEMORY,
    BatchPlan,
    best_of,
    default_rows,
    divisors,
    record_out_of_memory,
    slowdown_note,
)
from snaketune.training.autotune.machine_check import SHARE_OF_PEAK, MachineCheck
from snaketune.training.autotune.search import Trial, Trials, search
from snaketune.training.autotune.time_limit import SHARE, TimeLimit
from snaketune.training.autotune.timed_steps import Timing, time_steps
from snaketune.training.launch.worker import is_main_process
from snaketune.training.loop.pipeline import examine_machine, ready_trainer, refuse_unfit_machine
from snaketune.training.loop.sft_trainer import SftTrainer
from snaketune.training.loop.trainer import PreparedTraining, TrainingRun
from snaketune.training.loop.trl_trainer import RawRows, RawTrainer
from snaketune.training.preference.dpo_trainer import DpoTrainer
from snaketune.training.preference.pair_dataset import PairRows

GB = 1e9
# The share of the free memory that an unmeasured plan may be expected to need.
MEMORY_SHARE = 0.8


def measure_curve(
    spec: CalibrateSpec, work: WorkFolder, *, operation: Execution, pack: Artifact, tokenizer: Artifact
) -> Outcome:
    """Write `curve.json` to `work.payload`; SnaketuneError if no batch plan fits in memory, or the training can't run on
    this machine."""
    tokenizer.files()
    run = TrainingRun.of(spec.run, operation, work)
    training = _prepare(spec, pack, tokenizer, run)
    rows, run = training.rows, training.run
    # The smallest plan that may be chosen.
    smallest = BatchPlan(micro_batch_rows=1, gradient_checkpointing=spec.gradient_checkpointing is not False)
    runner = TrialRunner(spec, training)
    check = refuse_unfit_machine(runner.training(smallest))
    items = len(EqualTokens(rows)) if isinstance(rows, PackedRows) else len(rows)
    batch_rows = run.spec.training.batch_rows
    possible = [n for n in divisors(batch_rows, spec.processes) if n == 1 or n * spec.processes <= items]
    limit = TimeLimit(epochs=operation.calibrated_epochs, rows=items, batch_rows=batch_rows, processes=spec.processes)
    trials: list[Trial] = []
    allowed = limit.allows_first(_shortest_s(check, rows, run, operation.calibrated_epochs, spec.processes))
    for trial in search(possible, spec.gradient_checkpointing, runner.measure) if allowed else ():
        trials.append(trial)
        print(_line(trial), flush=True)
        if not limit.allows_another(trials):
            break
    fitting = [one for one in trials if one["fits"]]
    if trials and not fitting:
        raise SnaketuneError(
            f"not even {BatchPlan.of(trials[-1])} fit in memory: {trials[-1]['why']}; lower "
            "packing.length, use `lora` with `quantization`, or operation.launch: fsdp on more GPUs"
        )
    device = run.compute.device
    on_gpu = device.type == "cuda"
    curve = {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else runner.host_memory,
        "batch_rows": batch_rows,
        "processes": spec.processes,
        "trials": trials,
        "best": best_of(fitting) if fitting else None,
    }
    if not fitting:
        curve["default"] = asdict(_default_plan(possible, runner))
    if is_main_process():
        write_json(work.payload / CURVE, curve)
    _log_best(curve, spec, operation)
    return Outcome(counts={"trials": len(trials), "fitting": len(fitting)}, about=run.compute.about())


class TrialRunner:
    """Runs trials, each with a newly loaded model, and stores their results in the work folder."""

    def __init__(self, spec: CalibrateSpec, calibrated: PreparedTraining):
        self.spec, self.calibrated, self.run = spec, calibrated, calibrated.run
        self.store = Trials(self.run.work.state)
        # A trial may change it, so each one resets it.
        self.threads = torch.get_num_threads()
        self.host_memory = None if self.run.compute.device.type == "cuda" else host_memory_limit()

    def training(self, plan: BatchPlan) -> PreparedTraining:
        """Return the training with a batch plan."""
        return replace(self.calibrated, run=replace(self.run, operation=plan.apply_to(self.run.operation)))

    def measure(self, plan: BatchPlan, before: list[Trial]) -> Trial:
        """Return the trial of a plan, stored or run now. Args: before: trials with the same `gradient_checkpointing`."""
        trial = self.store.get(plan)
        # A collective operation: all processes read before the first one writes.
        trial = trial if all(gather_object([trial is not None])) else self._try(plan, before)
        if is_main_process():
            self.store.add(plan, trial)
        return trial

    def _try(self, plan: BatchPlan, before: list[Trial]) -> Trial:
        accumulation = self.run.spec.training.batch_rows // (plan.micro_batch_rows * self.spec.processes)
        trial = asdict(plan) | {"accumulation": accumulation, "fits": False}
        # Hosts may differ in memory, but all processes must decide alike.
        if why := next(filter(None, gather_object([self._host_memory_shortage(plan, before)])), ""):
            return trial | {"why": why}
        reset_peak_memory(self.run.compute.device)
        torch.set_num_threads(self.threads)
        if is_main_process():
            self.store.begin(trial)
        try:
            with ready_trainer(self.training(plan)) as trainer:
                timing = Timing.across_processes(gather_object([time_steps(trainer)]))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trial["why"] = first_line(error)
            if self.spec.processes > 1:
                # The other processes wait in the middle of a step, so all are restarted and continue after this trial.
                self.store.add(plan, trial)
                record_out_of_memory(self.run.work.state, None, error)
                raise
            (self.run.work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
            return trial
        facts = asdict(timing)
        tokens_per_second = round(facts.pop("tokens") * accumulation / timing.step_s(accumulation), 1)
        return trial | {"fits": True, "why": "", "tokens_per_second": tokens_per_second} | facts

    def _host_memory_shortage(self, plan: BatchPlan, before: list[Trial]) -> str:
        """The reason not to try a plan on a CPU or MPS, by its peak as extrapolated from the last two trials; empty to try
        it. A host that runs out of memory swaps or kills the process instead of raising an error."""
        fitted = [one for one in before if one["fits"]]
        if self.run.compute.device.type == "cuda" or len(fitted) < 2:
            return ""
        limit = host_memory_limit()
        (rows_0, peak_0), (rows_1, peak_1) = ((one["micro_batch_rows"], one["peak_bytes"]) for one in fitted[-2:])
        needed = peak_1 + (peak_1 - peak_0) / (rows_1 - rows_0) * (plan.micro_batch_rows - rows_1)
        return f"would need {needed / GB:.1f} GB, and the limit is {limit / GB:.1f} GB" if needed > limit else ""


def _shortest_s(check: MachineCheck, rows: Any, run: TrainingRun, epochs: float, processes: int) -> float | None:
    """Return the seconds that a training takes at best; None if unknown."""
    if check.planned is None or not isinstance(rows, PackedRows) or not epochs:
        return None
    rate = processes * peak_of(run.compute).flops_per_second * SHARE_OF_PEAK
    return check.planned.flops.per_token * rows.tokens * epochs / rate


def _default_plan(possible: list[int], runner: "TrialRunner") -> BatchPlan:
    """Return the plan where nothing was measured: the usual number of rows, or as many as are expected to fit in memory if
    each needs as much as the first one; with gradient checkpointing if allowed and no row fits without."""
    usual = default_rows(possible, on_cpu=runner.run.compute.device.type == "cpu")
    checkpointing = runner.spec.gradient_checkpointing
    for recomputes in (False, True) if checkpointing == "auto" else (checkpointing,):
        plan = BatchPlan(micro_batch_rows=1, gradient_checkpointing=recomputes)
        check = examine_machine(runner.training(plan))
        memory = check.estimate
        if memory is None or memory.step is None:
            return replace(plan, micro_batch_rows=usual)
        activations = round(memory.overhead * max(1, memory.step - memory.gradients))
        room = MEMORY_SHARE * check.machine.free - (memory.expected - activations)
        if fitting := [rows for rows in possible if rows <= min(usual, room // activations)]:
            return replace(plan, micro_batch_rows=fitting[-1])
    return plan


def _prepare(spec: CalibrateSpec, pack: Artifact, tokenizer: Artifact, run: TrainingRun) -> PreparedTraining:
    trained = {"run": run, "initial": AdapterStack(base=spec.base, tokenizer=tokenizer.folder)}
    in_memory = run.operation.load_in_memory
    if not isinstance(spec.run, SftSpec):
        rows = PairRows(pack, None, in_memory)
        return PreparedTraining(trainer_class=DpoTrainer, rows=rows, **trained).with_kernel()
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = PackedRows(pack, "train", in_memory)
        return PreparedTraining(trainer_class=SftTrainer, rows=rows, **trained).with_kernel()
    return PreparedTraining(trainer_class=RawTrainer, rows=RawRows(pack, tokenizer.folder), **trained)


def _line(trial: Trial) -> str:
    what = BatchPlan.of(trial)
    if not trial["fits"]:
        return f"{what}: {trial['why']}"
    return f"{what} x {trial['accumulation']}: {trial['tokens_per_second']:,.0f} tokens/s, {trial['peak_bytes'] / GB:.2f} GB"


def _log_best(curve: dict[str, Any], spec: CalibrateSpec, operation: Execution) -> None:
    best, device = curve["best"], curve["device"]
    if best is None:
        print(
            f"not measured, since a trial would take more than {SHARE:.0%} of the training: {BatchPlan.of(curve['default'])}, "
            "by memory; `snakemake calibrations` measures trainings whose micro_batch_rows is a number",
            flush=True,
        )
        return
    print(f"best: {BatchPlan.of(best)}, {best['tokens_per_second']:,.0f} tokens/s on {device}", flush=True)
    if operation.micro_batch_rows != "auto":
        # The config sets the rows, so `choose_plan` doesn't use the curve.
        recomputed = spec.gradient_checkpointing is True
        chosen = BatchPlan(micro_batch_rows=operation.micro_batch_rows, gradient_checkpointing=recomputed)
        if note := slowdown_note(chosen, curve):
            print(note, flush=True)
