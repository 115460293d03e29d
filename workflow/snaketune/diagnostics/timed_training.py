"""The computation of the `trial` stage: a short, timed training.

    steps      1 … w        w+1 … w+k     …            w+s
               warm-up    | window      | window …   |            tokens, seconds and mean loss of each window

It trains with the same rows, order and schedule as the run that it measures, and ends early. The clock is read at the end of
each window only, so that steps within a window overlap as usual.

    measured.json    fits, windows, tokens_per_second, sequences_per_second, peak_bytes, waited_share, mfu, probe, device …
    trace.json.gz    for chrome://tracing and Perfetto, if the spec has `profile`
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.diagnostics.step_profile import StepProfiler
from snaketune.diagnostics.trial_files import MEASURED, TRACE
from snaketune.errors import SnaketuneError
from snaketune.models.device_speed import probe
from snaketune.models.devices import keep_freed_memory
from snaketune.models.machine import peak_memory
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec, TrialSpec
from snaketune.training.launch.worker import is_main_process
from snaketune.training.loop import sft_trainer
from snaketune.training.loop.pipeline import examine_machine, ready_trainer
from snaketune.training.loop.trainer import BaseTrainer, PreparedTraining, TrainingRun
from snaketune.training.preference import dpo_trainer

WINDOWS = 10


def time_training(
    spec: TrialSpec,
    work: WorkFolder,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact],
    ref_logps: Sequence[Artifact],
) -> Outcome:
    """Fill `work.payload` with `measured.json`. Args: model: the results that the run starts from, if any."""
    for result in (tokenizer, *model):
        result.files()
    run = TrainingRun.of(spec.run, operation, work)
    if isinstance(spec.run, SftSpec):
        training = sft_trainer.prepare_training(run, pack, tokenizer, model)
    else:
        training = dpo_trainer.prepare_training(run, model, pack, *ref_logps)
    findings = examine_machine(training).findings
    if small := [finding.problem for finding in findings if finding.certain and finding.key == "training"]:
        # Too little memory is a measurement, like a trial that runs out of memory.
        measured = {"fits": False, "why": small[0]}
    else:
        report_findings(findings, log=is_main_process())
        if run.compute.device.type == "cpu":
            keep_freed_memory()
        measured = _measure(training, spec) | {"probe": probe(run.compute.device, work.state)}
        counts = pack.manifest["counts"]["train"]
        if counts.get("tokens"):
            # Conversations, documents or pairs.
            sequences = measured["tokens_per_second"] * counts["kept"] / counts["tokens"]
            measured["sequences_per_second"] = round(sequences, 3)
    if is_main_process():
        write_json(work.payload / MEASURED, measured)
        if measured["fits"]:
            print(
                f"{measured['tokens_per_second']:,.0f} tokens/s over {spec.steps} steps, "
                f"loss {measured['windows'][-1]['loss']}, {measured['peak_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
    return Outcome(counts={"steps": measured.get("steps", 0)}, about=run.compute.about())


class Mark(NamedTuple):
    """The end of a window: step, time, tokens of this process since the mark before, and seconds spent waiting so far."""

    step: int
    time: float
    tokens: float
    waited: float


class Windows(TrainerCallback):
    """Records marks at the ends of windows; ends the training after the last one."""

    def __init__(self, trainer: BaseTrainer, warmup: int, steps: int, window: int, keeps_running: bool):
        """Args: window: its steps; keeps_running: whether another callback ends the training."""
        self.meter, self.warmup, self.last, self.keeps_running = trainer.meter, warmup, warmup + steps, keeps_running
        self.length = window
        self.marks: list[Mark] = []

    def on_step_end(self, args, state, control, **_):
        """Record a mark at the end of a window. Called by the Trainer when a step is done."""
        step = state.global_step
        control.should_training_stop |= step >= self.last and not self.keeps_running
        # A short training may end before the last window.
        ends = step == min(self.last, state.max_steps)
        if not ends and (not self.warmup <= step < self.last or (step - self.warmup) % self.length):
            return
        if self.meter.device.type != "cpu":
            torch.accelerator.synchronize(self.meter.device)
        self.marks.append(Mark(step, time.monotonic(), float(self.meter.sums["tokens"]), self.meter.waited))
        # Logging takes the loss and resets its mean.
        control.should_log = True


class RisingLearningRate(TrainerCallback):
    """Raises the learning rate from step to step by equal factors; groups keep their ratios."""

    def __init__(self, spec: TrialSpec):
        (self.first, self.last), self.steps = spec.learning_rates, spec.warmup_steps + spec.steps
        self.configured = spec.run.training.learning_rate

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.first * (self.last / self.first) ** ((step - 1) / (self.steps - 1))

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        """Set the learning rate, in place of the schedule's for the same step."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(state.global_step + 1) * group["initial_lr"] / self.configured


def _measure(training: PreparedTraining, spec: TrialSpec) -> dict[str, Any]:
    with ready_trainer(training) as trainer:
        args, meter, device = trainer.args, trainer.meter, trainer.meter.device
        args.save_strategy, args.logging_strategy, args.logging_first_step = "no", "no", False
        window = 1 if spec.learning_rates else max(1, spec.steps // WINDOWS)
        windows = Windows(trainer, spec.warmup_steps, spec.steps, window, keeps_running=spec.profile)
        profiled = StepProfiler(windows.last, device, training.run.work.payload / TRACE)
        rising = [RisingLearningRate(spec)] if spec.learning_rates else []
        if rising:
            # A short training goes over its rows again. The run's schedule may not fit into these steps.
            args.max_steps, args.lr_scheduler_type = rising[0].steps, "constant"
        for callback in (windows, *[profiled] * spec.profile, *rising):
            trainer.add_callback(callback)
        trainer.compile()
        trainer.train()
        marks = windows.marks
        if len(marks) < 2:
            raise SnaketuneError(
                f"the whole training has {trainer.state.global_step} steps, but a trial measures after {spec.warmup_steps} "
                "steps of warm-up; raise training.epochs, or lower training.batch_rows"
            )
        processes = gather_object([{"tokens": [mark.tokens for mark in marks], "peak": peak_memory(device)}])
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        # A diverging run is timed like others; JSON has no value for its loss.
        losses = {entry["step"]: entry["loss"] if math.isfinite(entry["loss"]) else None for entry in history}
        tokens = [sum(some) for some in zip(*(one["tokens"] for one in processes))]
        measured_windows = [
            {"step": mark.step, "tokens": own, "seconds": round(mark.time - before.time, 6), "loss": losses[mark.step]}
            for before, mark, own in zip(marks, marks[1:], tokens[1:])
        ]
        speeds = sorted(one["tokens"] / one["seconds"] for one in measured_windows)
        about = meter.about(history)
        first, last = marks[0], marks[-1]
        step_seconds = (last.time - first.time) / (last.step - first.step)
        tested = [
            {"learning_rate": rising[0].rate(step), "loss": loss}
            for step, loss in losses.items()
            if spec.learning_rates
        ]
        return {
            "fits": True,
            "why": "",
            **({"learning_rates": tested} if tested else {}),
            "windows": measured_windows,
            "steps": trainer.state.global_step,
            "tokens_per_second": round(speeds[len(speeds) // 2], 3),
            "step_seconds": step_seconds,
            "tokens_in_warmup": first.tokens * len(processes),
            "peak_bytes": max(one["peak"] for one in processes),
            "waited_share": round((last.waited - first.waited) / max(1e-9, last.time - first.time), 4),
            "mfu": about["mfu_median"],
            "mfu_computed": about["mfu_computed_median"],
            "peak_flops_per_second": about["peak_flops_per_second"],
            "parts": profiled.shares(step_seconds),
            "compiled": trainer.compiled,
            "kernel": trainer.checked.about.get("kernel", "its own attention"),
            "parameters": trainer.parameters,
            "trainable_parameters": trainer.trainable,
            "micro_batch_rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "gradient_checkpointing": args.gradient_checkpointing,
            "processes": args.world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "libraries": {name: installed_version(name) for name in ("torch", "transformers")},
        }
