"""The computation of the `trial` stage, in launched processes: a short, timed training whose weights are discarded.

    steps      1 … w        w+1 … w+k     …            w+s
               warm-up    | window      | window …   |            tokens, seconds and mean loss of each window

It trains with the same rows, order and schedule as the run that it measures, and ends early. The clock is read at the end of
each window only, so that steps within a window overlap as usual.

    measured.json    fits, windows, tokens_per_second, sequences_per_second, peak_bytes, waited_share, mfu, probe, device …
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from snaketune.artifacts.manifest import Artifact, write_json
from snaketune.config.operation import Execution
from snaketune.diagnostics.step_profile import StepProfiler
from snaketune.diagnostics.trial_files import MEASURED, TRACE
from snaketune.errors import SnaketuneError
from snaketune.models.device_memory import peak_memory
from snaketune.models.devices import keep_freed_memory
from snaketune.models.speed_probe import probe
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec, TrialSpec
from snaketune.training.launch.worker import is_main_process
from snaketune.training.loop import sft_trainer
from snaketune.training.loop.pipeline import examine_machine, ready_trainer
from snaketune.training.loop.sample_order import SetEpoch
from snaketune.training.loop.trainer import BaseTrainer, PreparedTraining, TrainingRun
from snaketune.training.preference import dpo_trainer

WINDOWS = 10


def time_training(
    spec: TrialSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    ref_logps: Sequence[Artifact] = (),
) -> Outcome:
    """Fill `work.payload` with `measured.json`.

    Args:
        model, base_layers: the results that the run starts from, if any.
    Raises:
        SnaketuneError: a finding is certain to stop the training, or it has fewer steps than the warm-up.
    """
    tokenizer.files()
    for result in (*model, *base_layers):
        result.files()
    run = TrainingRun.of(spec.run, operation, work)
    if isinstance(spec.run, SftSpec):
        training = sft_trainer.prepare_training(run, pack, tokenizer, (*model, *base_layers))
    else:
        training = dpo_trainer.prepare_training(run, (*model, *base_layers), pack, *ref_logps)
    machine_check = examine_machine(training)
    if small := [
        finding.problem for finding in machine_check.findings if finding.certain and finding.key == "training"
    ]:
        # Too little memory is a measurement, like a trial that runs out of memory.
        if is_main_process():
            write_json(work.payload / MEASURED, {"fits": False, "why": small[0]})
        return Outcome(counts={"steps": 0}, about=run.compute.about())
    report_findings(machine_check.findings, log=is_main_process())
    if run.compute.device.type == "cpu":
        keep_freed_memory()
    measured = _measure(training, spec) | {"probe": probe(run.compute.device, work.state)}
    measured |= _sequences(measured, pack)
    if is_main_process():
        write_json(work.payload / MEASURED, measured)
        print(
            f"{measured['tokens_per_second']:,.0f} tokens/s over {spec.steps} steps, "
            f"loss {measured['windows'][-1]['loss']}, {measured['peak_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
    return Outcome(counts={"steps": measured["steps"]}, about=run.compute.about())


class Windows(TrainerCallback):
    """Records marks at the ends of windows; ends the training after the last one."""

    def __init__(self, trainer: BaseTrainer, warmup: int, steps: int, keeps_running: bool):
        """Args: keeps_running: whether another callback ends the training."""
        self.meter, self.warmup, self.last, self.keeps_running = trainer.meter, warmup, warmup + steps, keeps_running
        self.length = max(1, steps // WINDOWS)
        # Step, time, tokens since the mark before, and the seconds spent waiting for rows so far.
        self.marks: list[tuple[int, float, float, float]] = []

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
        self.marks.append((step, time.monotonic(), float(self.meter.sums.get("tokens", 0)), self.meter.waited))
        # Logging takes the loss and resets its mean.
        control.should_log = True


def _measure(training: PreparedTraining, spec: TrialSpec) -> dict[str, Any]:
    with ready_trainer(training) as trainer:
        args, meter = trainer.args, trainer.meter
        args.save_strategy, args.logging_strategy, args.logging_first_step = "no", "no", False
        windows = Windows(trainer, spec.warmup_steps, spec.steps, keeps_running=spec.profile)
        profiled = StepProfiler(windows.last, meter.device, training.run.work.payload / TRACE)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(SetEpoch(trainer))
        trainer.add_callback(windows)
        if spec.profile:
            trainer.add_callback(profiled)
        trainer.compile()
        trainer.train()
        if len(windows.marks) < 2:
            raise SnaketuneError(
                f"the whole training has {trainer.state.global_step} steps, but a trial measures after {spec.warmup_steps} "
                "steps of warm-up; raise training.epochs, or lower training.batch_rows"
            )
        own = {"tokens": [tokens for _, _, tokens, _ in windows.marks], "peak": peak_memory(meter.device)}
        processes = gather_object([own])
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        measured_windows = _windows(
            windows.marks, [sum(tokens) for tokens in zip(*(one["tokens"] for one in processes))], history
        )
        about = meter.about(history)
        first, last = windows.marks[0], windows.marks[-1]
        step_seconds = (last[1] - first[1]) / (last[0] - first[0])
        return {
            "fits": True,
            "why": "",
            "windows": measured_windows,
            "steps": trainer.state.global_step,
            "tokens_per_second": _median([one["tokens"] / one["seconds"] for one in measured_windows]),
            "step_seconds": step_seconds,
            "tokens_in_warmup": first[2] * len(processes),
            "peak_bytes": max(one["peak"] for one in processes),
            "waited_share": round((last[3] - first[3]) / max(1e-9, last[1] - first[1]), 4),
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
            "device": device_name(meter.device),
            "libraries": {name: installed_version(name) for name in ("torch", "transformers")},
        }


def device_name(device: torch.device) -> str:
    """Return the device's name for the report."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _windows(
    marks: list[tuple[int, float, float, float]], tokens: list[float], history: list[dict[str, float]]
) -> list[dict[str, float | None]]:
    """Return the windows between marks. Args: tokens: of all processes, by mark; history: a line with the loss at each mark."""
    # A diverging run is timed like others; JSON has no value for its loss.
    losses = {entry["step"]: entry["loss"] if math.isfinite(entry["loss"]) else None for entry in history}
    return [
        {"step": step, "tokens": own, "seconds": round(end - before, 6), "loss": losses[step]}
        for (step, end, *_), own, (_, before, *_) in zip(marks[1:], tokens[1:], marks)
    ]


def _sequences(measured: dict[str, Any], pack: Artifact) -> dict[str, float]:
    """Return conversations, documents or pairs per second, from the tokens per second and the counts of the pack."""
    counts = pack.manifest["counts"]["train"]
    if not counts.get("tokens"):
        return {}
    return {"sequences_per_second": round(measured["tokens_per_second"] * counts["kept"] / counts["tokens"], 3)}


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)
