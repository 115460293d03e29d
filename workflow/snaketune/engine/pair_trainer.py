"""Training on packed pairs: metrics from sums over pairs by source, in log lines, on held-out pairs, and in checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch

from snaketune.engine.pair_metrics import MetricSums, Sums, metrics_of
from snaketune.engine.trainer import PackedTrainer

METRICS_STATE = "pair_metrics.json"


class PairTrainer(PackedTrainer):
    """A Trainer on pairs; subclasses define the sums over pairs, and the metrics that are computed from them."""

    # The reference log-probabilities were computed without dropout; and TRL turns it off for reward models, too.
    drops_out = False
    sums_losses = False
    # Names of the sums over pairs.
    sum_names: tuple[str, ...]

    metric_sums: MetricSums
    # Sums of the steps since the last log line, per step and source; part of checkpoints.
    unlogged: list[list[Sums]]

    def __init__(self, *, settings: Any, **arguments: Any):
        self.settings, self.unlogged, self.metric_sums = settings, [], MetricSums(self.sum_names)
        super().__init__(**arguments)

    def counts(self):
        return super().counts() | {"pairs": self.rows.pairs}

    # What a subclass defines.

    def means(self, sums: Sums) -> dict[str, float]:
        """Metrics from sums over pairs."""
        raise TypeError("a subclass defines this")

    def add_step(self, sums: list[Sums]) -> None:
        """Use the sums of a finished step, by source, besides the log line."""

    def outputs(self, batch: dict[str, Any]) -> torch.Tensor:
        """What held-out pairs are scored by, float32[P, K]."""
        raise TypeError("a subclass defines this")

    def score(
        self, rows_PK: torch.Tensor, source_P: torch.Tensor, sources: int, totals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of held-out pairs by their `outputs`, and their sums by source. Args: totals: int64, their `items`."""
        raise TypeError("a subclass defines this")

    # Metrics.

    def on_step_end(self, args, state, control, **_):
        self.metric_sums.end_step()

    def read_metrics(self) -> None:
        """Read the sums of finished steps. A collective operation."""
        for sums in self.metric_sums.read(self.gather_processes):
            self.unlogged.append(sums)
            self.add_step(sums)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            self.read_metrics()
            logs |= metrics_of(self.unlogged, self.means) if self.unlogged else {}
            self.unlogged = []
        super().log(logs, *arguments, **keywords)

    def held_out_metrics(self, batches):
        blocks, totals = [], torch.zeros((), dtype=torch.int64)
        for batch in batches:
            blocks.append(torch.cat([self.outputs(batch), batch["source"][:, None].float()], dim=1))
            totals = totals + torch.tensor(self.items(batch))
        rows_PK, _ = self.gather_pairs(torch.cat(blocks))
        totals = totals.to(self.args.device)
        if self.gather_processes:
            totals = self.gather_processes(totals[None]).sum(0)
        loss, sums_SK = self.score(rows_PK[:, :-1], rows_PK[:, -1].long(), self.held_out.rows.sources, totals)
        return {"loss": float(loss)} | metrics_of([self.metric_sums.by_name(sums_SK)], self.means)

    # Checkpoints.

    def metrics_state(self) -> dict[str, Any]:
        return {"unlogged": self.unlogged}

    def restore_metrics(self, state: dict[str, Any]) -> None:
        self.unlogged = state["unlogged"]

    def _save_checkpoint(self, model, trial):
        self.read_metrics()
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            (self.checkpoint_folder / METRICS_STATE).write_text(json.dumps(self.metrics_state()), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.restore_metrics(json.loads((Path(resume_from_checkpoint) / METRICS_STATE).read_text(encoding="utf-8")))
