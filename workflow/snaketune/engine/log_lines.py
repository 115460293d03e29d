"""Log lines: means and counts of the optimizer steps since the line before, whichever process made them.

What isn't logged yet is part of every checkpoint, so a training that is resumed from any step logs the lines of an undisturbed
one:

    step        1   2   3   4   5   6   7   8
    log_steps 4             line            line of steps 5 to 8
    process     -------------------|----------       preempted after step 5, whose loss and tokens are in the checkpoint
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.engine.checkpoints import diverged
from snaketune.files import write_json

# For each process: the sum of the losses since the last line, and what its meter counted.
UNLOGGED = "unlogged.json"


class LogLinesMixin:
    """Mixin for transformers' Trainer with a ThroughputMeter: adds loss and throughput to the Trainer's log lines."""

    # Sum of the micro-batches' shares of the loss since the last line, on this process' device.
    unlogged_loss: torch.Tensor | float = 0.0

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **keywords)
        self.unlogged_loss = self.unlogged_loss + loss
        return loss

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Complete the line of a training: its mean loss, throughput, and the meter's means."""
        if "loss" in logs:
            # The Trainer's own mean knows the steps of this process only.
            before = next((line["step"] for line in reversed(self.state.log_history) if "loss" in line), 0)
            losses = torch.as_tensor(self.unlogged_loss, device=self.args.device)[None]
            losses = self.gather_processes(losses) if self.gather_processes else losses
            logs["loss"] = losses.mean().item() / (self.state.global_step - before)
            self.unlogged_loss = 0.0
            logs |= self.meter.read(self.gather_processes)
            # The count is saved in checkpoints, as are the tokens that no line has counted yet.
            self.state.num_input_tokens_seen += int(logs.pop("tokens", 0))
        # Not TRL's, which adds means over the steps of this process.
        Trainer.log(self, logs, *arguments, **keywords)

    def _save_checkpoint(self, model, trial):
        self.meter.stop()
        unlogged = [[float(self.unlogged_loss), *self.meter.unlogged()]]
        if self.gather_processes:
            gathered = torch.tensor(unlogged, dtype=torch.float64, device=self.args.device)
            unlogged = self.gather_processes(gathered).tolist()
        if not all(math.isfinite(loss) for loss, *_ in unlogged):
            raise diverged(self.state.global_step, "the loss of a step since the last log line isn't finite")
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            write_json(folder / UNLOGGED, unlogged)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        unlogged = json.loads((Path(resume_from_checkpoint) / UNLOGGED).read_text(encoding="utf-8"))
        if len(unlogged) == self.args.world_size:
            self.unlogged_loss, *counted = unlogged[self.args.process_index]
        else:
            # Of another number of processes: each loss is an estimate of that of the whole step, and counts are added up.
            losses, *counts, seconds = zip(*unlogged)
            self.unlogged_loss = sum(losses) / len(losses)
            is_first = self.args.process_index == 0
            counted = [*(sum(count) if is_first else 0.0 for count in counts), max(seconds)]
        self.meter.restore(counted)
