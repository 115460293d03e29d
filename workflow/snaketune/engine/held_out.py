"""Measuring held-out rows between two steps of a training, by its own kernel and packing, without a trace in the training.

A measurement follows the log line of its step and precedes the step's checkpoint, so a resumed training has those of its
checkpoint and measures the later ones again. One that a preemption cuts short is repeated after the resume, before the next
step.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from snaketune.engine.checkpoints import WEIGHTS, diverged, load_weights, mark_complete
from snaketune.engine.held_out_samples import SamplePrompts
from snaketune.engine.held_out_schedule import Schedule, plan_measurements
from snaketune.engine.held_out_selection import (
    HELD_OUT,
    best_folder,
    best_point,
    best_step,
    points,
    reason_to_stop,
    remove_other_best,
)
from snaketune.engine.model.batches import Batch
from snaketune.engine.model.forward import inner_model
from snaketune.engine.model.kernels import SEPARATE, Unpackable
from snaketune.engine.model.packing_support import check_config
from snaketune.engine.packing.rows import PackedRows
from snaketune.engine.tensor_files import write
from snaketune.errors import SnaketuneError

# Names of metrics in the log, in the order of the line.
SHOWN = ("loss", "accuracy", "margin", "kl")


class Interrupted(Exception):
    """The training is to end early, before a measurement is complete."""


@dataclass
class HeldOut:
    """Measurements of a training.

    Attributes:
        rows: the held-out rows of its pack.
        prompts: of the samples; None if the training can't answer any.
        schedule: chosen when the training begins.
        seconds, measurements: what this process' measurements took, and their number.
        kept_at_checkpoint: step of the weights that a resume from the last checkpoint needs.
        stopped: the step after which `stop_if` ended the training, and the reason.
    """

    rows: PackedRows
    prompts: SamplePrompts | None = None
    schedule: Schedule = field(default_factory=Schedule)
    seconds: float = 0.0
    measurements: int = 0
    kept_at_checkpoint: int | None = None
    stopped: dict[str, Any] | None = None


class HeldOutMixin:
    """Mixin for transformers' Trainer: measures held-out rows, keeps the best weights and stops as the spec says."""

    held_out: HeldOut | None = None

    def held_out_metrics(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Compute metrics of the batches of all processes, `loss` among them; every process calls it, with equally many."""
        raise TypeError("a subclass defines this")

    def use_held_out(self, rows: PackedRows | None, config: PretrainedConfig | None, tokenizer: Path | None) -> None:
        """Measure these rows during the training, if the run has measurements, unless only another kernel can.

        Args:
            config: of the initial model; None if only the model has it.
            tokenizer: its folder, for samples; None for none.
        """
        if not self.run.operation.evaluate:
            return
        why_not = self._cannot_measure(rows, config)
        if why_not and self.run.spec.training.selects:
            raise SnaketuneError(f"training.keep and training.stop_if need held-out rows, and {why_not}")
        if why_not:
            print(f"held-out rows aren't measured: {why_not}", flush=True)
            return
        sharded = self.run.in_shards or self.run.operation.launch == "deepspeed"
        self.held_out = HeldOut(rows, None if sharded or tokenizer is None else SamplePrompts(rows, tokenizer))

    def on_train_begin(self, args, state, control, **_):
        """Choose the measurements, and measure at the current step: the first one, or one that was cut short."""
        if self.held_out is None:
            return
        self.plan_held_out(state.max_steps)
        self.held_out.kept_at_checkpoint = best_step(state, self.run.spec.training)
        measured = {point["step"] for point in points(state.log_history)}
        if state.global_step in self.held_out.schedule.steps and state.global_step not in measured:
            self.measure(interruptible=False)

    def on_step_end(self, args, state, control, **_):
        if self.held_out:
            control.should_evaluate = state.global_step in self.held_out.schedule.steps
            # A measurement may end the training, or be preempted.
            control.should_log |= control.should_evaluate

    def on_save(self, args, state, control, **_):
        """Remove the best weights that no resume needs any more, once the checkpoint is complete."""
        super().on_save(args, state, control)
        if self.held_out:
            self.held_out.kept_at_checkpoint = best_step(state, self.run.spec.training)
            if state.is_world_process_zero and self.run.spec.training.keep == "best":
                remove_other_best(self.run.work.state, self.held_out.kept_at_checkpoint)

    def _cannot_measure(self, rows: PackedRows | None, config: PretrainedConfig | None) -> str:
        """Return why the training can't measure these rows; "" if it can."""
        if rows is None or not len(rows):
            return "the corpus holds out no row that was packed"
        model, kernel = inner_model(self.model), self.run.compute.kernel
        if kernel != SEPARATE:
            try:
                check_config(config or model.config, rows.longest[0], rows.has_prefixes, kernel)
            except Unpackable as error:
                return f"the training's kernel, {kernel}, doesn't compute them: {error}"
        if (kernel, rows.has_prefixes) not in getattr(model, "allowed_packed", ()):
            return f"the training's kernel, {kernel}, is proved right for rows without prefixes only"
        return ""

    def plan_held_out(self, steps: int) -> None:
        """Choose the measurements of a training of so many steps."""
        held_out, training = self.held_out, self.run.spec.training
        held_out.schedule = schedule = plan_measurements(
            self.run.operation.evaluate,
            steps=steps,
            trained_tokens=self.rows.tokens * training.epochs,
            row_tokens_R=held_out.rows.row_tokens,
            sample_tokens=held_out.prompts.tokens(self.run.operation.evaluate.samples) if held_out.prompts else 0,
            passes=2 if self.run.spec.lora else 3,
            limited=not training.selects,
        )
        line = "held-out rows aren't measured, since the training is too short; set training.evaluate.every"
        if schedule.steps:
            line = (
                f"held-out rows: {len(schedule.rows)} of {len(held_out.rows)} are measured {len(schedule.steps)} times, about "
                f"{schedule.share:.1%} of the computation"
            )
        print(line, flush=True)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        """Measure after a step; replaces the Trainer's own evaluation."""
        # At the end of an epoch the Trainer would evaluate again.
        self.control.should_evaluate = False
        if self.preemption and self.preemption.reason:
            # The training ends here, and is measured when it resumes.
            return {}
        try:
            self.measure(interruptible=True)
        except Interrupted:
            self.control.should_save = self.control.should_training_stop = True
        return {}

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        # Stopped by a measurement that was repeated.
        if not self.control.should_training_stop:
            super()._run_epoch(*arguments, **keywords)

    def measure(self, interruptible: bool) -> None:
        """Measure the held-out rows, log the metrics, keep the weights if they are the best, and stop if configured.

        Raises:
            Interrupted: the training is to be preempted; nothing was logged. Only if `interruptible`.
            SnaketuneError: the loss isn't finite, or the rows have no `training.metric`.
        """
        held_out, step = self.held_out, self.state.global_step
        self.meter.stop()
        started = time.monotonic()
        with self._evaluating():
            metrics = self.held_out_metrics(self._held_out_batches(interruptible))
            if not math.isfinite(metrics["loss"]):
                raise diverged(step, f"the loss of held-out rows is {metrics['loss']}")
            training = self.run.spec.training
            if training.selects and training.metric not in metrics:
                raise SnaketuneError(
                    f"training.metric: {training.metric} isn't defined for these held-out rows, which have "
                    f"{', '.join(metrics)}; completions of one label only have no margin, and unpaired ones no accuracy"
                )
            answers = self._answers()
        held_out.seconds += time.monotonic() - started
        held_out.measurements += 1
        best = best_point(points(self.state.log_history), training.metric)
        # Adding zero turns -0.0 into 0.0.
        line = {f"{HELD_OUT}{name}": round(value, 6) + 0.0 for name, value in metrics.items()}
        self.log(line | ({f"{HELD_OUT}samples": answers} if answers else {}))
        self._print(best, answers)
        self._select()

    def _select(self) -> None:
        """Keep the weights if this measurement is the best, and end the training if `stop_if` says so."""
        training, step, state = self.run.spec.training, self.state.global_step, self.run.work.state
        if training.keep == "best" and best_step(self.state, training) == step:
            with self.average.in_use() if self.average else nullcontext():
                self._save_best(best_folder(state, step))
        reason = reason_to_stop(points(self.state.log_history), training)
        if reason and step < self.state.max_steps:
            self.held_out.stopped = {"step": step, "reason": reason, "held_out": True}
            print(f"stopped early, after step {step}: {reason}", flush=True)
            # As for `dpo.stop_if`: a retry from the previous checkpoint repeats this step and stops again.
            self.control.should_training_stop, self.control.should_save = True, False

    def _save_best(self, folder: Path) -> None:
        is_main = self.args.should_save
        self.run.work.check_held()
        if is_main:
            remove_other_best(self.run.work.state, self.held_out.kept_at_checkpoint)
            folder.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        write(folder, WEIGHTS, self.finite_tensors(keep=is_main), is_main)
        self.accelerator.wait_for_everyone()
        if is_main:
            mark_complete(folder, self.run.work.check_held)

    def use_best(self) -> dict[str, Any]:
        """Load the weights that are kept or averaged, after the last step; return facts for the manifest."""
        training = self.run.spec.training
        if self.held_out is None or training.keep == "last":
            if self.average:
                self.average.swap()
            return {}
        best = best_point(points(self.state.log_history), training.metric)
        step, value = best["step"], best[training.metric]
        if step != self.state.global_step:
            load_weights(best_folder(self.run.work.state, step), self.accelerator.unwrap_model(self.model))
        elif self.average:
            self.average.swap()
        print(f"kept: the weights of step {step}, with the best held-out {training.metric}, {value:.5g}", flush=True)
        return {"kept": {"step": step, "metric": training.metric, "value": value}}

    def about_held_out(self, seconds: float) -> dict[str, Any]:
        """Return the measurements for run.json. Args: seconds: what the training took in this process."""
        held_out = self.held_out
        if held_out is None or not held_out.schedule.steps:
            return {}
        share = round(held_out.seconds / seconds, 4)
        facts = {
            "points": points(self.state.log_history),
            "rows": len(held_out.schedule.rows),
            "of_rows": len(held_out.rows),
            "seconds": round(held_out.seconds, 2),
            "share_of_time": share,
            **({"stopped": held_out.stopped} if held_out.stopped else {}),
        }
        print(f"held-out rows: {held_out.measurements} measurements took {share:.1%} of the time", flush=True)
        return {"held_out": facts}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Compute as in evaluation: without dropout, gradients or compiled layers, for which every shape would be compiled."""
        with (
            self.average.in_use() if self.average else nullcontext(),
            self.as_in_training(autocast=False, step_precision=False),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            self.compute_loss_context_manager(),
        ):
            self.model_wrapped.eval()
            try:
                yield
            finally:
                self.model_wrapped.train()

    def _held_out_batches(self, interruptible: bool) -> Iterator[Batch]:
        """Yield this process' batches of the measured rows; equally many in all processes, the last ones perhaps of padding."""
        rows, kernel = self.held_out.rows, self.run.compute.kernel
        measured, processes = self.held_out.schedule.rows, self.args.world_size
        own, size = measured[self.args.process_index :: processes], self.args.per_device_train_batch_size
        for start in range(0, math.ceil(len(measured) / processes), size):
            batch = self.collate(
                [rows[row] for row in own[start : start + size]] or [rows.blank()], kernel, rows.longest[0]
            )
            yield self._prepare_inputs(batch)
            if interruptible and self.preemption and self.preemption.interrupts():
                raise Interrupted
            self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _answers(self) -> list[dict[str, str]]:
        """The answers of the model to the sample prompts, of the main process."""
        held_out = self.held_out
        if not held_out.schedule.samples or held_out.prompts is None or not self.is_world_process_zero():
            return []
        model = self.accelerator.unwrap_model(self.model)
        return held_out.prompts.answers(model, held_out.schedule.samples, self.run.compute)

    def _print(self, best: dict[str, Any] | None, answers: list[dict[str, str]]) -> None:
        """Print the newest measurement. Args: best: the best one before it."""
        point, metric = points(self.state.log_history)[-1], self.run.spec.training.metric
        facts = ", ".join(f"{name} {point[name]:.4g}" for name in SHOWN if name in point)
        compared = f"  (best before: {best[metric]:.4g} at step {best['step']})" if best else ""
        print(f"step {point['step']}/{self.state.max_steps}  held out: {facts}{compared}", flush=True)
        for number, answer in enumerate(answers, start=1):
            if self.held_out.measurements == 1:
                print(f"    prompt {number}: {answer['prompt']!r}", flush=True)
            print(f"    answer {number}: {answer['answer']!r}", flush=True)
