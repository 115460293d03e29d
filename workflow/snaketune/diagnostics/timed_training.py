"""The computation of the `timing` stage: a short, timed training.

    steps      1 … k        k+1 … 2k      …            10k+1 … 11k    two more
    log lines  warm-up    | window      | window …   | window       | profiled, without a line

It trains with the same rows, order and schedule as the run that it measures, and ends early. The device is only waited for at
the end of each window, where the Trainer logs a line, so that steps within a window overlap as usual.

    measured.json    fits, windows, tokens_per_second, memory_gb, expected_memory_gb, waited_share, mfu, parts, probe …
    trace.json.gz    for chrome://tracing and Perfetto, if the spec has `profile`
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.diagnostics.settings import MEASURED
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.model.device_speed import probe
from snaketune.engine.model.devices import keep_freed_memory
from snaketune.engine.throughput import GB
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec, TimingSpec
from snaketune.tracking.curves import TrackedRun
from snaketune.training.launch.worker import is_main_process
from snaketune.training.pipeline import examine_machine, ready_trainer, take_steps
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.prepared_dpo import prepare_dpo
from snaketune.training.prepared_sft import prepare_sft

# For chrome://tracing and Perfetto.
TRACE = "trace.json.gz"
WINDOWS = 10


def build(
    spec: TimingSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    pack: Artifact,
    tokenizer: Artifact,
    base: Sequence[Path] = (),
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    ref_logps: Sequence[Artifact] = (),
    reference: Sequence[Artifact] = (),
    tracked: TrackedRun | None = None,
) -> Outcome:
    """Fill `work.payload` with `measured.json`.

    Args:
        model, base_layers: the results that the run starts from, if any.
        tracked: not used, as timings aren't tracked.
    """
    start = (*model, *base_layers)
    for result in (tokenizer, *start):
        result.files()
    run = TrainingRun.of(spec.run, operation, work)
    if isinstance(spec.run, SftSpec):
        training = prepare_sft(run, pack, tokenizer, start)
    else:
        training = prepare_dpo(run, start, pack, *ref_logps, reference=reference)
    check = examine_machine(training)
    if small := [finding.problem for finding in check.findings if finding.certain and finding.key == "training"]:
        # Too little memory is a measurement, like running out of it.
        measured = {"fits": False, "why": small[0]}
    else:
        report_findings(check.findings, log=is_main_process())
        if run.compute.device.type == "cpu":
            keep_freed_memory()
        expected = check.estimate and check.estimate.expected
        measured = _measure(training, spec) | {
            "expected_memory_gb": expected and round(expected / GB, 3),
            "probe": probe(run.compute.device, work.state),
        }
    if is_main_process():
        write_json(work.payload / MEASURED, measured)
    return Outcome(counts={"steps": measured.get("steps", 0)}, about=run.compute.about())


class TimedSteps(TrainerCallback):
    """Has the Trainer log a line after each window, and ends the training after the last one, or after the profiled steps."""

    def __init__(self, trainer: TrainingFeatures, steps: int, profiler: torch.profiler.profile | None):
        self.meter, self.profiler, self.profiled = trainer.meter, profiler, False
        self.window = max(1, steps // WINDOWS)
        # The first window is the warm-up.
        self.last = self.window * (1 + steps // self.window)
        # By line: the tokens of all processes so far, and the seconds that this one has waited for rows.
        self.lines: list[tuple[int, float]] = []

    def on_step_begin(self, args, state, control, **_):
        if self.profiler and state.global_step == self.last <= state.max_steps - PROFILED_STEPS:
            self.profiler.start()

    def on_step_end(self, args, state, control, **_):
        step = state.global_step
        # A short training may end before the last window.
        control.should_log |= step <= self.last and (step % self.window == 0 or step == state.max_steps)
        control.should_training_stop |= step >= self.last + PROFILED_STEPS * bool(self.profiler)
        if self.profiler and step == self.last + PROFILED_STEPS:
            if self.meter.device.type != "cpu":
                torch.accelerator.synchronize(self.meter.device)
            self.profiler.stop()
            self.profiled = True

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.lines.append((state.num_input_tokens_seen, self.meter.waited))


def _measure(training: PreparedTraining, spec: TimingSpec) -> dict[str, Any]:
    with ready_trainer(training) as (trainer, loaded):
        args, device = trainer.args, trainer.meter.device
        args.save_strategy, args.logging_strategy, args.logging_first_step = "no", "no", False
        timed = TimedSteps(trainer, spec.steps, profiler_of(device) if spec.profile else None)
        trainer.add_callback(timed)
        trainer.compile()
        take_steps(trainer, training.run.work)
        lines = [entry for entry in trainer.state.log_history if "loss" in entry]
        if len(lines) < 2:
            raise SnaketuneError(
                f"the whole training has {trainer.state.global_step} steps, which are too few to be timed; raise "
                "training.epochs, or lower training.batch_rows"
            )
        throughput, (tokens, waited) = trainer.meter.about(lines), zip(*timed.lines, strict=True)
        seconds = (tokens[-1] - tokens[0]) / throughput["tokens_per_second_median"]
        step_seconds = seconds / (lines[-1]["step"] - lines[0]["step"])
        if timed.profiled and is_main_process():
            timed.profiler.export_chrome_trace(str(training.run.work.payload / TRACE))
        return {
            "fits": True,
            # A diverging run is timed like others; JSON has no value for its loss.
            "windows": [
                {"tokens": seen, "loss": line["loss"] if math.isfinite(line["loss"]) else None}
                for seen, line in zip(tokens, lines, strict=True)
            ],
            "steps": trainer.state.global_step,
            "tokens_per_second": throughput["tokens_per_second_median"],
            "memory_gb": throughput["peak_memory_gb"],
            "waited_share": round((waited[-1] - waited[0]) / seconds, 4),
            "mfu": throughput["mfu_computed_median"],
            "parts": shares_of_parts(timed.profiler, device, step_seconds) if timed.profiled else {},
            "compiled": trainer.compiled,
            "kernel": loaded.about.get("kernel", "its own attention"),
            "micro_batch_rows": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "gradient_checkpointing": args.gradient_checkpointing,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "libraries": {name: installed_version(name) for name in ("torch", "transformers")},
        }


PROFILED_STEPS = 2
# Parts by the names of operators and of the kernels of torch, cuBLAS, CUTLASS, cuDNN and NCCL; the first match counts. A fused
# pointwise kernel is named after everything in it; the loss has a softmax too.
WORDS = {
    "other": "triton_poi triton_red triton_per cpp_fused log_softmax logsoftmax",
    "attention": "attention flash fmha sdpa varlen softmax",
    "optimizer": "adam optimizer foreach multi_tensor sgd lion adafactor",
    "products": "::mm _mm addmm bmm matmul gemm linear cutlass cublas nvjet xmma triton_tem",
    "communication": "nccl gloo allreduce allgather reducescatter c10d::",
    "copies": "copy memcpy memset cat index gather scatter contiguous clone",
}
PARTS = {part: tuple(words.split()) for part, words in WORDS.items()}
REST, WAITING = "other", "waiting"


def profiler_of(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def shares_of_parts(profiler: torch.profiler.profile, device: torch.device, step_seconds: float) -> dict[str, float]:
    """The share of each part in PROFILED_STEPS steps; empty without events.

    On a GPU this is the time in its kernels, of `step_seconds` without profiling, which delays their launch. On a CPU it is the
    time of operators themselves in the computing thread, of the profiled steps, as profiling slows operators down. Waiting is
    the remaining time: for data, for Python, for kernel launches.
    """
    on_gpu = device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA
    # A GPU's timeline also has ranges that code marks, above the kernels within them.
    events = [
        event
        for event in profiler.events()
        if (event.device_type == kind) == on_gpu and not (on_gpu and event.is_user_annotation)
    ]
    if not events:
        return {}
    if on_gpu:
        timed = [(event.name, event.time_range.elapsed_us()) for event in events]
        return shares_by_part(timed, 1e6 * PROFILED_STEPS * step_seconds)
    whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return shares_by_part([(event.name, event.self_cpu_time_total) for event in events], whole)


def shares_by_part(timed: Iterable[tuple[str, float]], whole: float) -> dict[str, float]:
    """The share of each part in a total time.

    >>> shares_by_part([("aten::mm", 60.0), ("aten::add", 10.0), ("Optimizer.step#AdamW.step", 5.0)], 100.0)
    {'other': 0.1, 'attention': 0.0, 'optimizer': 0.05, 'products': 0.6, 'communication': 0.0, 'copies': 0.0, 'waiting': 0.25}
    """
    shares: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
    for name, time in timed:
        low = name.lower()
        part = next((part for part, words in PARTS.items() if any(word in low for word in words)), REST)
        shares[part] += time
    shares = {part: round(min(1.0, time / whole), 4) for part, time in shares.items()}
    return shares | {WAITING: round(max(0.0, 1 - sum(shares.values())), 4)}
