"""Measure the throughput of batch plans on this device: the work of the `calibrate` stage, in launched processes.

Trials are short trainings on real rows, in the order of `search`. The rows of an optimizer step stay the same, so the choice
doesn't change what is learned. Measured times vary, so `curve.json` isn't reproducible; it isn't part of any training's
fingerprint.
"""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.model.device_speed import peak_of
from snaketune.engine.model.machine import host_memory_limit, is_out_of_memory, reset_peak_memory
from snaketune.engine.packing.rows import EqualTokens, PackedRows
from snaketune.engine.packing.shards import FORMAT_VERSIONS
from snaketune.engine.sft import SftTrainer
from snaketune.errors import SnaketuneError, first_line
from snaketune.files import write_json
from snaketune.models.adapter_stack import AdapterStack
from snaketune.packing.reader import open_rows
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CalibrateSpec, DpoSpec, RewardSpec
from snaketune.tracking.curves import TrackedRun
from snaketune.training.autotune.batch_plan import (
    CURVE,
    OUT_OF_MEMORY,
    BatchPlan,
    default_rows,
    record_out_of_memory,
)
from snaketune.training.autotune.machine_check import shortest_seconds
from snaketune.training.autotune.search import (
    MICRO_BATCHES,
    SHARE,
    TRIALS,
    Trial,
    best_of,
    halvings,
    is_too_short,
    read_trials,
    search,
)
from snaketune.training.autotune.timed_steps import SECONDS, time_steps
from snaketune.training.launch.worker import is_main_process
from snaketune.training.pair_rows import pair_rows
from snaketune.training.pipeline import examine_machine, ready_trainer, refuse_unfit_machine
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.prepared_dpo import preference_settings
from snaketune.training.prepared_reward import reward_training
from snaketune.training.prepared_sft import sft_loss
from snaketune.training.trl_trainer import RawRows, RawTrainer

GB = 1e9
# The share of the free memory that an unmeasured plan may be expected to need.
MEMORY_SHARE = 0.8


def build(
    spec: CalibrateSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: list[Path],
    tracked: TrackedRun | None = None,
) -> Outcome:
    """Write `curve.json` to `work.payload`; SnaketuneError if no batch plan fits in memory, or the training can't run on
    this machine.

    Args:
        base: not read, as the spec has its path.
        tracked: not used; a calibration isn't tracked.
    """
    tokenizer.files()
    runner = TrialRunner(spec, _prepare(spec, pack, tokenizer, TrainingRun.of(spec.run, operation, work)))
    trials = search(runner.rows, spec.gradient_checkpointing, runner.measure, runner.is_worthwhile)
    fitting = [trial for trial in trials if trial["fits"]]
    if trials and not fitting:
        raise SnaketuneError(
            f"not even {BatchPlan.of(trials[-1])} fit in memory: {trials[-1]['why']}; lower "
            "packing.length, use `lora` with `quantization`, or operation.launch: fsdp on more GPUs"
        )
    device = runner.run.compute.device
    on_gpu = device.type == "cuda"
    curve = {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else runner.host_memory,
        "batch_rows": spec.run.training.batch_rows,
        "processes": spec.processes,
        "trials": trials,
        "best": best_of(fitting) if fitting else None,
    }
    if fitting:
        best = curve["best"]
        print(f"best: {BatchPlan.of(best)}, {best['tokens_per_second']:,.0f} tokens/s on {curve['device']}", flush=True)
    else:
        plan = runner.estimated_plan()
        curve["default"] = asdict(plan)
        print(
            f"not measured, since a trial would take more than {SHARE:.0%} of the training: {plan}, by memory",
            flush=True,
        )
    if is_main_process():
        write_json(work.payload / CURVE, curve)
    return Outcome(counts={"trials": len(trials), "fitting": len(fitting)}, about=runner.run.compute.about())


class TrialRunner:
    """Runs trials, each with a newly loaded model. Checks first that the training can run on this machine: SnaketuneError."""

    def __init__(self, spec: CalibrateSpec, calibrated: PreparedTraining):
        self.spec, self.calibrated, self.run = spec, calibrated, calibrated.run
        rows, batch_rows = calibrated.rows, spec.run.training.batch_rows
        self.items = len(EqualTokens(rows)) if isinstance(rows, PackedRows) else len(rows)
        self.share = batch_rows // spec.processes
        self.rows = [count for count in halvings(self.share) if count == 1 or count * spec.processes <= self.items]
        # A trial may change it, so each one resets it.
        self.threads = torch.get_num_threads()
        self.host_memory = None if self.run.compute.device.type == "cuda" else host_memory_limit()
        # Of earlier launches: all processes have those that the first one reads.
        self.trials: list[Trial] = gather_object([read_trials(self.run.work.state)])[0]
        smallest = BatchPlan(micro_batch_rows=1, gradient_checkpointing=spec.gradient_checkpointing is not False)
        self.check = refuse_unfit_machine(self.training(smallest))

    def training(self, plan: BatchPlan) -> PreparedTraining:
        """Return the training with a batch plan."""
        return replace(self.calibrated, run=replace(self.run, operation=plan.apply_to(self.run.operation)))

    def _shortest_s(self) -> float:
        """Return the seconds that the training takes at best; infinity if unknown."""
        rows, planned = self.calibrated.rows, self.check.planned
        if not planned or not isinstance(rows, PackedRows):
            return math.inf
        flops = planned.flops.per_token * rows.tokens * self.run.operation.calibrated_epochs
        return shortest_seconds(flops, self.spec.processes, peak_of(self.run.compute))

    def is_worthwhile(self, trials: list[Trial]) -> bool:
        """Whether another trial, with twice the rows of the last one, keeps the calibration below its share of the training.
        Without `calibrated_epochs` there is no limit: the user wants the curve."""
        fitting, epochs = [trial for trial in trials if trial["fits"]], self.run.operation.calibrated_epochs
        if not epochs or (trials and not fitting):
            return True
        if fitting:
            steps = math.ceil(self.items * epochs / self.spec.run.training.batch_rows)
            training_s = steps * min(trial["step_s"] for trial in fitting)
            trial_s = fitting[-1]["trial_s"] + MICRO_BATCHES * fitting[-1]["micro_batch_s"]
        elif is_too_short(self.items * epochs / self.spec.processes):
            return False
        else:
            training_s, trial_s = self._shortest_s(), SECONDS
        # All processes must decide alike.
        return all(gather_object([_elapsed_s() + trial_s <= SHARE * training_s]))

    def measure(self, plan: BatchPlan) -> Trial:
        """Return the trial of a plan, run now unless an earlier launch did."""
        for trial in self.trials:
            if BatchPlan.of(trial) == plan:
                return trial
        self.trials.append(self._try(plan))
        self._store(self.trials)
        print(_line(self.trials[-1]), flush=True)
        return self.trials[-1]

    def _store(self, trials: list[Trial]) -> None:
        if is_main_process():
            write_json(self.run.work.state / TRIALS, trials)

    def _try(self, plan: BatchPlan) -> Trial:
        started, accumulation = time.monotonic(), self.share // plan.micro_batch_rows
        trial = asdict(plan) | {"accumulation": accumulation, "fits": False}
        # A host that runs out of memory swaps or kills the process instead of raising an error.
        if self.host_memory and max(gather_object([self._expected_memory(plan) - host_memory_limit()])) > 0:
            return trial | {"why": f"would need {self._expected_memory(plan) / GB:.1f} GB, more than is free"}
        reset_peak_memory(self.run.compute.device)
        torch.set_num_threads(self.threads)
        self._store([*self.trials, trial | {"why": "out of memory"}])
        try:
            with ready_trainer(self.training(plan)) as (trainer, _):
                timings = gather_object([time_steps(trainer, self.run.work)])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self.spec.processes > 1:
                # The other processes wait in the middle of a step, so all are restarted and continue after this trial.
                record_out_of_memory(self.run.work.state, None, error)
                raise
            (self.run.work.state / OUT_OF_MEMORY).unlink(missing_ok=True)
            return trial | {"why": first_line(error)}
        # Processes wait for the slowest one.
        slowest = {
            name: max(timing[name] for timing in timings) for name in ("micro_batch_s", "optimizer_s", "peak_bytes")
        }
        step_s = accumulation * slowest["micro_batch_s"] + slowest.pop("optimizer_s")
        tokens = accumulation * sum(timing["tokens"] for timing in timings)
        speed = {
            "tokens_per_second": round(tokens / step_s, 1),
            "step_s": step_s,
            "trial_s": time.monotonic() - started,
        }
        return trial | {"fits": True, "why": ""} | speed | slowest

    def _expected_memory(self, plan: BatchPlan) -> int:
        """Return the estimated peak in bytes; 0 if unknown."""
        memory = examine_machine(self.training(plan)).estimate
        return (memory and memory.expected) or 0

    def estimated_plan(self) -> BatchPlan:
        """Return the plan where nothing was measured: the usual number of rows, or as many as are expected to fit in memory;
        with gradient checkpointing if allowed and no row fits without."""
        usual = default_rows(self.share, on_cpu=self.run.compute.device.type == "cpu")
        checkpointing = self.spec.gradient_checkpointing
        plans = [
            BatchPlan(micro_batch_rows=rows, gradient_checkpointing=recomputes)
            for recomputes in ((False, True) if checkpointing == "auto" else (checkpointing,))
            for rows in reversed(halvings(usual))
        ]
        fits = (plan for plan in plans if self._expected_memory(plan) <= MEMORY_SHARE * self.check.machine.free)
        return next(fits, plans[-1])


def _elapsed_s() -> float:
    """Return the seconds since this process started."""
    return time.time() - psutil.Process().create_time()


def _prepare(spec: CalibrateSpec, pack: Artifact, tokenizer: Artifact, run: TrainingRun) -> PreparedTraining:
    initial, in_memory = AdapterStack(base=spec.base, tokenizer=tokenizer.folder), run.operation.load_in_memory
    if isinstance(spec.run, RewardSpec):
        return reward_training(run, initial, pack, held_out=False)
    trained: dict[str, Any] = {"run": run, "initial": initial}
    if isinstance(spec.run, DpoSpec):
        rows, loss = pair_rows(pack, None, in_memory), {"settings": preference_settings(spec.run)}
        return PreparedTraining(trainer_class=DpoTrainer, rows=rows, loss=loss, **trained).with_kernel()
    trained["loss"] = sft_loss(spec.run)
    if pack.manifest.get("format_version") in FORMAT_VERSIONS["sft"]:
        rows = open_rows(pack, "train", in_memory)
        return PreparedTraining(trainer_class=SftTrainer, rows=rows, **trained).with_kernel()
    return PreparedTraining(trainer_class=RawTrainer, rows=RawRows(pack, tokenizer.folder), **trained)


def _line(trial: Trial) -> str:
    what = BatchPlan.of(trial)
    if not trial["fits"]:
        return f"{what}: {trial['why']}"
    return f"{what} x {trial['accumulation']}: {trial['tokens_per_second']:,.0f} tokens/s, {trial['peak_bytes'] / GB:.2f} GB"
