"""What the `trial` stage runs: a short training, timed, of which nothing but figures is kept; in launched processes.

    steps      1 … w        w+1 … w+k     …            w+s
               warm-up    | window      | window …   |            tokens, seconds and mean loss of each window

It is the very training that it stands for, with the same rows in the same order and the same schedule, ended early. The clock
is looked at where a window ends, so that steps within one overlap as they always do.

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
from snaketune.diagnostics.step_profile import Profiled
from snaketune.diagnostics.trial_files import MEASURED, TRACE
from snaketune.errors import SnaketuneError
from snaketune.models.device_memory import peak_memory
from snaketune.models.devices import keep_freed_memory
from snaketune.models.speed_probe import probe
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.gpu_needs import tell
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec, TrialSpec
from snaketune.training.launch.worker import is_main_process
from snaketune.training.loop import sft_trainer
from snaketune.training.loop.pipeline import PreparedTraining, examine_machine, ready_trainer
from snaketune.training.loop.sample_order import SetEpoch
from snaketune.training.loop.trainer import BaseTrainer, TrainingRun
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
        model, beneath: what the run starts from, where that is a result.
    Raises:
        SnaketuneError: such a model can't be trained on such rows here.
    """
    tokenizer.files()
    for result in (*model, *base_layers):
        result.files()
    run = TrainingRun.of(spec.run, operation, work)
    if isinstance(spec.run, SftSpec):
        begun = sft_trainer.prepare_training(run, pack, tokenizer, (*model, *base_layers))
    else:
        begun = dpo_trainer.begin(run, (*model, *base_layers), pack, *ref_logps)
    fitness = examine_machine(begun.trainer_class, begun.rows, begun.run, begun.config or begun.made)
    if small := [finding.found for finding in fitness.findings if finding.certain and finding.key == "training"]:
        # Found beforehand, it is as much a finding as a trial that runs out of memory.
        if is_main_process():
            write_json(work.payload / MEASURED, {"fits": False, "why": small[0]})
        return Outcome(counts={"steps": 0}, about=run.compute.about())
    tell(fitness.findings, aloud=is_main_process())
    if run.compute.device.type == "cpu":
        keep_freed_memory()
    measured = _measure(begun, spec) | {"probe": probe(run.compute.device, work.state)}
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
    """Marks where windows begin and end; ends the training after the last."""

    def __init__(self, trainer: BaseTrainer, warmup: int, steps: int, goes_on: bool):
        """Args: goes_on: whether somebody else ends the training."""
        self.meter, self.warmup, self.last, self.goes_on = trainer.meter, warmup, warmup + steps, goes_on
        self.length = max(1, steps // WINDOWS)
        # Step, time, the tokens that were counted since the mark before, and the seconds that were waited for rows so far.
        self.marks: list[tuple[int, float, float, float]] = []

    def on_step_end(self, args, state, control, **_):
        """Of the Trainer: a step is done."""
        step = state.global_step
        control.should_training_stop |= step >= self.last and not self.goes_on
        # A short training may be over before.
        ends = step == min(self.last, state.max_steps)
        if not ends and (not self.warmup <= step < self.last or (step - self.warmup) % self.length):
            return
        if self.meter.device.type != "cpu":
            torch.accelerator.synchronize(self.meter.device)
        self.marks.append((step, time.monotonic(), float(self.meter.sums.get("tokens", 0)), self.meter.waited))
        # The log takes the loss, and begins to count anew.
        control.should_log = True


def _measure(begun: PreparedTraining, spec: TrialSpec) -> dict[str, Any]:
    with ready_trainer(*begun[:5]) as ready:
        trainer = ready.trainer
        args, meter = trainer.args, trainer.meter
        args.save_strategy, args.logging_strategy, args.logging_first_step = "no", "no", False
        windows = Windows(trainer, spec.warmup_steps, spec.steps, goes_on=spec.profile)
        profiled = Profiled(windows.last, meter.device, begun.run.work.payload / TRACE)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(SetEpoch(trainer))
        trainer.add_callback(windows)
        if spec.profile:
            trainer.add_callback(profiled)
        trainer.compile()
        trainer.train()
        if len(windows.marks) < 2:
            raise SnaketuneError(
                f"the whole training has {trainer.state.global_step} steps, and {spec.warmup_steps} of a trial go before one "
                "is measured; give it more epochs, or its steps fewer rows (training.batch_rows)"
            )
        own = {"tokens": [tokens for _, _, tokens, _ in windows.marks], "peak": peak_memory(meter.device)}
        everyone = gather_object([own])
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        found = _windows(windows.marks, [sum(tokens) for tokens in zip(*(one["tokens"] for one in everyone))], history)
        about = meter.about(history)
        first, last = windows.marks[0], windows.marks[-1]
        step_seconds = (last[1] - first[1]) / (last[0] - first[0])
        return {
            "fits": True,
            "why": "",
            "windows": found,
            "steps": trainer.state.global_step,
            "tokens_per_second": _median([one["tokens"] / one["seconds"] for one in found]),
            "step_seconds": step_seconds,
            "tokens_in_warmup": first[2] * len(everyone),
            "peak_bytes": max(one["peak"] for one in everyone),
            "waited_share": round((last[3] - first[3]) / max(1e-9, last[1] - first[1]), 4),
            "mfu": about["mfu_median"],
            "mfu_computed": about["mfu_computed_median"],
            "peak_flops_per_second": about["peak_flops_per_second"],
            "parts": profiled.shares(step_seconds),
            "compiled": trainer.compiled,
            "kernel": ready.about.get("kernel", "its own attention"),
            "parameters": ready.parameters,
            "trainable_parameters": ready.trainable,
            "micro_batch_rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "gradient_checkpointing": args.gradient_checkpointing,
            "processes": args.world_size,
            "device": device_name(meter.device),
            "libraries": {name: installed_version(name) for name in ("torch", "transformers")},
        }


def device_name(device: torch.device) -> str:
    """As the report calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _windows(
    marks: list[tuple[int, float, float, float]], tokens: list[float], history: list[dict[str, float]]
) -> list[dict[str, float | None]]:
    """What lies between marks. Args: tokens: of all processes, by mark; history: a line with the loss at each mark."""
    # One that diverges is as fast as others; JSON has no word for its loss.
    losses = {entry["step"]: entry["loss"] if math.isfinite(entry["loss"]) else None for entry in history}
    return [
        {"step": step, "tokens": own, "seconds": round(at - before, 6), "loss": losses[step]}
        for (step, at, *_), own, (_, before, *_) in zip(marks[1:], tokens[1:], marks)
    ]


def _sequences(measured: dict[str, Any], pack: Artifact) -> dict[str, float]:
    """Conversations, documents or pairs per second, as many as there are to so many tokens."""
    counts = pack.manifest["counts"]["train"]
    if not counts.get("tokens"):
        return {}
    return {"sequences_per_second": round(measured["tokens_per_second"] * counts["kept"] / counts["tokens"], 3)}


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)
