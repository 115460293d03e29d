"""The `dpo` stage: direct preference optimization on packed pairs, against reference log-probabilities from their artifact;
in launched processes.

The prompt of a pair is computed once for both completions, and no reference model is in memory. The loss is the mean over
the pairs of an optimizer step.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.models.batches import collate
from snaketune.models.logprobs import pair_logprobs, token_losses
from snaketune.models.stacked import ADAPTER, Stack
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec
from snaketune.stages.work import WorkFolder
from snaketune.tracking.curves import Tracked
from snaketune.training import pipeline
from snaketune.training.dpo_loss import dpo_loss
from snaketune.training.launched import is_first_process
from snaketune.training.packed import PackedTrainer
from snaketune.training.pairs import PairRows
from snaketune.training.reference import check_policy_is_reference, check_ref_logps
from snaketune.training.trainer import Run


class DpoTrainer(PackedTrainer):
    """Learns which completion of a pair is the chosen one."""

    # The reference had none.
    drops_out = False
    sums_losses = False

    def counts(self):
        return super().counts() | {"pairs": self.rows.pairs}

    @staticmethod
    def collate(rows, kernel, bounds=None):
        return collate(rows, kernel, bounds) | {"reference": torch.cat([row["reference"] for row in rows])}

    def items(self, batch):
        return len(batch["reference"])

    def log_ratios(self, model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Policy to reference: float32[P, 2], and int64[P, 2] tokens."""
        sums_P2, counts_P2 = pair_logprobs(token_losses(model, batch), batch)
        return sums_P2 - batch["reference"], counts_P2

    def check_start(self):
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        trained_P2, counts_P2 = self._log_ratios_before(batch, training=True)
        evaluated_P2, _ = self._log_ratios_before(batch, training=False)
        self.model.train()
        external = self.run.spec.reference is not None
        check_policy_is_reference(trained_P2, evaluated_P2, counts_P2, self.run.compute.dtype, external=external)

    @torch.no_grad()
    def _log_ratios_before(self, batch: dict[str, Any], training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As in training or in evaluation, but without a trace of it."""
        self.model.train(training)
        device = self.run.compute.device
        with (
            torch.random.fork_rng([device.index] if device.type == "cuda" else []),
            self.compute_loss_context_manager(),
        ):
            return self.log_ratios(self.model, batch)

    def batch_loss(self, model, batch):
        spec = self.run.spec
        ratios_P2, counts_P2 = self.log_ratios(model, batch)
        chosen_P, rejected_P = ratios_P2[:, 0], ratios_P2[:, 1]
        self._count(chosen_P.detach(), rejected_P.detach(), spec.beta)
        return dpo_loss(
            chosen_P, rejected_P, counts_P2, loss=spec.loss, beta=spec.beta, label_smoothing=spec.label_smoothing
        ).sum()

    def _count(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor, beta: float) -> None:
        self.gauge.add(
            items=len(chosen_P),
            accuracy=(chosen_P > rejected_P).sum(),
            margin=beta * (chosen_P - rejected_P).sum(),
            chosen_reward=beta * chosen_P.sum(),
            rejected_reward=beta * rejected_P.sum(),
        )


def build(
    spec: DpoSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    pack: Artifact,
    ref_logps: Artifact,
    beneath: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    tracked: Tracked | None = None,
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer; or with an adapter in their place.

    Args:
        beneath, base: what lies beneath the model, if that is an adapter alone.
    """
    for result in (model, *beneath):
        result.files()
    outcome = train_on(Run.of(spec, operation, work, tracked), (model, *beneath), pack, ref_logps)
    if is_first_process():
        for name in model.manifest["payload"]:
            # The tokenizer comes along; weights, and an index that tells how they were split, are this run's own.
            weights = name.endswith((".safetensors", ".index.json"))
            if "/" not in name and not weights and not (work.payload / name).exists():
                shutil.copyfile(model.folder / name, work.payload / name)
    return outcome


def train_on(run: Run, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact) -> Outcome:
    """Train on packed pairs, from the model that is their reference unless another one is."""
    spec, tokenizer = run.spec, results[0].folder
    check_ref_logps(
        ref_logps, spec, model=results, pack=pack, compute=run.compute, any_kernel=run.operation.share_kernels
    )
    if spec.continued:
        # The uppermost result's adapter is put upon what lies beneath it, where it is trained further.
        results, run = results[1:], replace(run, adapter=tokenizer / ADAPTER)
    start = Stack(results=results, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code)
    rows = PairRows(pack, ref_logps, run.operation.load_in_memory)
    return pipeline.train(DpoTrainer, rows, run, start.load, start.config(), start.named_base)
