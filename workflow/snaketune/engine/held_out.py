"""Measuring held-out rows between two steps of a training, by its own kernel and packing, without a trace in the training.

A measurement follows the log line of its step and precedes the step's checkpoint, so a resumed training has those of its
checkpoint and measures the later ones again. One that a preemption cuts short is repeated after the resume, before the next
step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, TrainerCallback

from snaketune.engine.checkpoints import WEIGHTS, diverged, load_weights, mark_complete
from snaketune.engine.measurements import (
    HELD_OUT,
    Decoder,
    HeldOutSettings,
    SamplePrompts,
    Schedule,
    best_folder,
    best_point,
    best_step,
    plan_measurements,
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

if TYPE_CHECKING:
    from snaketune.engine.trainer import PackedTrainer

# Names of metrics in the log, in the order of the line.
SHOWN = ("loss", "accuracy", "margin", "kl", "agreement")


class Interrupted(Exception):
    """The training is to end early, before a measurement is complete."""


class HeldOut(TrainerCallback):
    """The measurements of a training; a callback that follows the trainer's own.

    Attributes:
        folder: of the best weights.
        prompts: of the samples; None if the training can't answer any.
        schedule: chosen when the training begins.
        seconds, measurements: what this process' measurements took, and their number.
        kept_at_checkpoint: step of the weights that a resume from the last checkpoint needs.
        stopped: the step after which `patience` ended the training, and the reason.
    """

    def __init__(
        self,
        trainer: "PackedTrainer",
        rows: PackedRows,
        settings: HeldOutSettings,
        folder: Path,
        load_decoder: Callable[[], Decoder] | None = None,
    ):
        self.trainer, self.rows, self.settings, self.folder = trainer, rows, settings, folder
        self.prompts = load_decoder and SamplePrompts(rows, load_decoder)
        self.schedule = Schedule()
        self.seconds, self.measurements = 0.0, 0
        self.kept_at_checkpoint: int | None = None
        self.stopped: dict[str, Any] | None = None

    def on_train_begin(self, args, state, control, **_):
        """Choose the measurements, and measure at the current step: the first one, or one that was cut short."""
        self.plan(state.max_steps)
        self.kept_at_checkpoint = best_step(state, self.settings.metric)
        measured = {point["step"] for point in points(state.log_history)}
        if state.global_step in self.schedule.steps and state.global_step not in measured:
            self.measure(interruptible=False)

    def on_step_end(self, args, state, control, **_):
        control.should_evaluate |= state.global_step in self.schedule.steps
        # A measurement may end the training, or be preempted.
        control.should_log |= control.should_evaluate

    def on_save(self, args, state, control, **_):
        """Remove the best weights that no resume needs any more, once the checkpoint is complete."""
        self.kept_at_checkpoint = best_step(state, self.settings.metric)
        if state.is_world_process_zero and self.settings.keep_best:
            remove_other_best(self.folder, self.kept_at_checkpoint)

    def plan(self, steps: int) -> None:
        """Choose the measurements of a training of so many steps."""
        trainer = self.trainer
        self.schedule = plan_measurements(
            self.settings,
            steps=steps,
            trained_tokens=trainer.rows.tokens * trainer.args.num_train_epochs,
            row_tokens_R=self.rows.row_tokens,
            sample_tokens=self.prompts.tokens(self.settings.samples) if self.prompts else 0,
            passes=2 if trainer.has_frozen_base else 3,
            limited=not self.settings.selects,
        )
        line = "held-out rows aren't measured, since the training is too short; set training.evaluate.every"
        if self.schedule.steps:
            line = (
                f"held-out rows: {len(self.schedule.rows)} of {len(self.rows)} are measured {len(self.schedule.steps)} times, "
                f"about {self.schedule.share:.1%} of the computation"
            )
        print(line, flush=True)

    def after_step(self) -> None:
        """Measure, unless the training is preempted."""
        trainer = self.trainer
        if trainer.preemption and trainer.preemption.reason:
            # The training ends here, and is measured when it resumes.
            return
        try:
            self.measure(interruptible=True)
        except Interrupted:
            trainer.control.should_save = trainer.control.should_training_stop = True

    def measure(self, interruptible: bool) -> None:
        """Measure the held-out rows, log the metrics, keep the weights if they are the best, and stop if configured.

        Raises:
            Interrupted: the training is to be preempted; nothing was logged. Only if `interruptible`.
            SnaketuneError: the loss isn't finite, or the rows have no such metric.
        """
        trainer, metric = self.trainer, self.settings.metric
        trainer.meter.stop()
        started = time.monotonic()
        with self._evaluating():
            metrics = trainer.held_out_metrics(self._batches(interruptible))
            if not math.isfinite(metrics["loss"]):
                raise diverged(trainer.state.global_step, f"the loss of held-out rows is {metrics['loss']}")
            if self.settings.selects and metric not in metrics:
                raise SnaketuneError(
                    f"training.metric: {metric} isn't defined for these held-out rows, which have {', '.join(metrics)}; "
                    "completions of one label only have no margin, and unpaired ones no accuracy"
                )
            answers = self._answers()
        self.seconds += time.monotonic() - started
        self.measurements += 1
        best = best_point(points(trainer.state.log_history), metric)
        # Adding zero turns -0.0 into 0.0.
        line = {f"{HELD_OUT}{name}": round(value, 6) + 0.0 for name, value in metrics.items()}
        trainer.log(line | ({f"{HELD_OUT}samples": answers} if answers else {}))
        self._print(best, answers)
        self._select()

    def _select(self) -> None:
        """Keep the weights if this measurement is the best, and end the training if `patience` says so."""
        trainer, step = self.trainer, self.trainer.state.global_step
        if self.settings.keep_best and best_step(trainer.state, self.settings.metric) == step:
            with trainer.average.in_use() if trainer.average else nullcontext():
                self._save_best(best_folder(self.folder, step))
        reason = reason_to_stop(points(trainer.state.log_history), self.settings)
        if reason and step < trainer.state.max_steps:
            self.stopped = {"step": step, "reason": reason, "held_out": True}
            print(f"stopped early, after step {step}: {reason}", flush=True)
            # As for `dpo.stop_if`: a retry from the previous checkpoint repeats this step and stops again.
            trainer.control.should_training_stop, trainer.control.should_save = True, False

    def _save_best(self, folder: Path) -> None:
        trainer, is_main = self.trainer, self.trainer.args.should_save
        check_lock = trainer.options.check_lock
        check_lock()
        if is_main:
            remove_other_best(self.folder, self.kept_at_checkpoint)
            folder.mkdir(parents=True)
        trainer.accelerator.wait_for_everyone()
        write(folder, WEIGHTS, trainer.finite_tensors(keep=is_main), is_main)
        trainer.accelerator.wait_for_everyone()
        if is_main:
            mark_complete(folder, check_lock)

    def use_best(self) -> dict[str, Any]:
        """Load the weights of the best measurement, after the last step; return facts for the manifest."""
        trainer, metric = self.trainer, self.settings.metric
        best = best_point(points(trainer.state.log_history), metric)
        step, value = best["step"], best[metric]
        if step != trainer.state.global_step:
            load_weights(best_folder(self.folder, step), trainer.accelerator.unwrap_model(trainer.model))
        elif trainer.average:
            trainer.average.swap()
        print(f"kept: the weights of step {step}, with the best held-out {metric}, {value:.5g}", flush=True)
        return {"kept": {"step": step, "metric": metric, "value": value}}

    def about(self, seconds: float) -> dict[str, Any]:
        """Return the measurements for run.json. Args: seconds: what the training took in this process."""
        if not self.schedule.steps:
            return {}
        share = round(self.seconds / seconds, 4)
        facts = {
            "points": points(self.trainer.state.log_history),
            "rows": len(self.schedule.rows),
            "of_rows": len(self.rows),
            "seconds": round(self.seconds, 2),
            "share_of_time": share,
            **({"stopped": self.stopped} if self.stopped else {}),
        }
        print(f"held-out rows: {self.measurements} measurements took {share:.1%} of the time", flush=True)
        return {"held_out": facts}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Compute as in evaluation: without dropout, gradients or compiled layers, for which every shape would be compiled."""
        trainer = self.trainer
        with (
            trainer.average.in_use() if trainer.average else nullcontext(),
            trainer.as_in_training(autocast=False, step_precision=False),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            trainer.compute_loss_context_manager(),
        ):
            trainer.model_wrapped.eval()
            try:
                yield
            finally:
                trainer.model_wrapped.train()

    def _batches(self, interruptible: bool) -> Iterator[Batch]:
        """Yield this process' batches of the measured rows; equally many in all processes, the last ones perhaps of padding."""
        trainer, rows, args = self.trainer, self.rows, self.trainer.args
        measured, processes = self.schedule.rows, args.world_size
        share, size = measured[args.process_index :: processes], args.per_device_train_batch_size
        for start in range(0, math.ceil(len(measured) / processes), size):
            chosen = [rows[row] for row in share[start : start + size]] or [rows.blank()]
            yield trainer._prepare_inputs(trainer.collate(chosen, trainer.compute.kernel, rows.longest[0]))
            if interruptible and trainer.preemption and trainer.preemption.interrupts():
                raise Interrupted
            trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)

    def _answers(self) -> list[dict[str, str]]:
        """The answers of the model to the sample prompts, of the main process."""
        trainer = self.trainer
        if not self.schedule.samples or self.prompts is None or not trainer.is_world_process_zero():
            return []
        model = trainer.accelerator.unwrap_model(trainer.model)
        return self.prompts.answers(model, self.schedule.samples, trainer.compute)

    def _print(self, best: dict[str, Any] | None, answers: list[dict[str, str]]) -> None:
        """Print the newest measurement. Args: best: the best one before it."""
        state, metric = self.trainer.state, self.settings.metric
        point = points(state.log_history)[-1]
        facts = ", ".join(f"{name} {point[name]:.4g}" for name in SHOWN if name in point)
        compared = f"  (best before: {best[metric]:.4g} at step {best['step']})" if best else ""
        step = f"{self.trainer.options.log_prefix}step {point['step']}/{state.max_steps}"
        print(f"{step}  held out: {facts}{compared}", flush=True)
        for number, answer in enumerate(answers, start=1):
            if self.measurements == 1:
                print(f"    prompt {number}: {answer['prompt']!r}", flush=True)
            print(f"    answer {number}: {answer['answer']!r}", flush=True)


def why_not_measurable(
    model: torch.nn.Module, kernel: str, rows: PackedRows | None, config: PretrainedConfig | None
) -> str:
    """Return why a training can't measure these rows by its kernel; "" if it can. Args: config: of the initial model; None if
    only the model has it."""
    if rows is None or not len(rows):
        return "the corpus holds out no row that was packed"
    model = inner_model(model)
    if kernel != SEPARATE:
        try:
            check_config(config or model.config, rows.longest[0], rows.has_prefixes, kernel)
        except Unpackable as error:
            return f"the training's kernel, {kernel}, doesn't compute them: {error}"
    if (kernel, rows.has_prefixes) not in getattr(model, "allowed_packed", ()):
        return f"conversations that branch don't pass the self-test of the training's kernel, {kernel}, and some are held out"
    return ""
