"""The trainer of packed pairs: what it begins with, what a step's loss is made of, what is counted of it, and when it ends
early."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.artifacts.manifest import Artifact
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, Stack, check_trained_on
from snaketune.models.batches import collate
from snaketune.stages.outcome import Outcome
from snaketune.training.loop import pipeline
from snaketune.training.loop.packed_trainer import PackedTrainer
from snaketune.training.loop.pipeline import PreparedTraining
from snaketune.training.loop.step_loss import derivatives, features, loss_of, needs_prompts, needs_whole_step
from snaketune.training.loop.trainer import TrainingRun
from snaketune.training.preference.dpo_loss import Pairs
from snaketune.training.preference.dpo_monitor import Course
from snaketune.training.preference.metrics import Sums, Tally, added, by_source, means
from snaketune.training.preference.pair_dataset import PairRows
from snaketune.training.preference.pair_features import pairs_of
from snaketune.training.reference.logps_table import check_policy_is_reference, check_ref_logps

COURSE = "course.json"
# What a row has besides its tokens.
PER_PAIR = ("reference", "source", "desirable")


class DpoTrainer(PackedTrainer):
    """Learns which completion of a pair is the chosen one, or which of single completions are good."""

    # The reference had none.
    drops_out = False
    sums_losses = False

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        spec = self.run.spec
        self.tally = Tally(spec, self.rows.sources)
        self.course = Course(spec, from_zero=spec.reference is None)
        # The sums of the steps since the last line of the log, by source.
        self.unlogged: list[list[Sums]] = []
        # Where a loss is of a whole step: the micro-batches of the one that begins.
        self.to_weigh: list[dict[str, Any]] = []
        self.add_callback(_StepEnds(self))

    def counts(self):
        return super().counts() | {"pairs": self.rows.pairs}

    def collate(self, rows, kernel, longest=None):
        batch = collate(rows, kernel, longest, prompts=needs_prompts(self.run.spec))
        counts_C = batch["completion_tokens"]
        pairs = {name: torch.cat([row[name] for row in rows]) for name in PER_PAIR if name in rows[0]}
        # Known here, so that no device is asked for them.
        items = (len(pairs["reference"]), int(counts_C[::2].sum()), len(batch.get("sequence_members", ())))
        return batch | pairs | {"items": items}

    def items(self, batch):
        return batch["items"]

    def check_start(self):
        if not self.run.spec.needs_reference:
            return
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        trained, evaluated = (self._pairs_before(batch, training=training) for training in (True, False))
        self.model.train()
        external = self.run.spec.reference is not None
        check_policy_is_reference(
            trained.ratios_P2, evaluated.ratios_P2, trained.counts_P2, self.run.compute.dtype, external=external
        )

    @torch.no_grad()
    def _pairs_before(self, batch: dict[str, Any], training: bool) -> Pairs:
        """As in training or in evaluation, but without a trace of it."""
        self.model.train(training)
        with self.as_in_training():
            return pairs_of(self.model, batch, self.run.spec)

    def batch_loss(self, model, batch, totals):
        pairs = pairs_of(model, batch, self.run.spec)
        self.tally.add(pairs, batch["source"])
        if "derivatives" not in batch:
            return loss_of(pairs, self.run.spec, totals)
        share = (features(pairs) * batch["derivatives"]).sum()
        # What is logged is the loss, of which each pair has the same share.
        return share + (batch["loss"] - share).detach()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The Trainer's hook at the beginning of a step."""
        batches, totals = super().get_batch_samples(epoch_iterator, num_batches, device)
        if needs_whole_step(self.run.spec) and (len(batches) > 1 or self.args.world_size > 1):
            self.to_weigh = batches
        return batches, totals

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The Trainer's hook. A resumed training has its random states only here, not yet when it takes its batches."""
        if self.to_weigh:
            self._weigh(model, num_items_in_batch)
            self.to_weigh = []
        return super().training_step(model, inputs, num_items_in_batch)

    @torch.no_grad()
    def _weigh(self, model: torch.nn.Module, totals: torch.Tensor) -> None:
        """Give each micro-batch of a step the derivatives of the step's loss by what it is about to compute again.

        Adapters drop the same inputs out in both passes: the first one leaves the random states as they were.
        """
        device = self.run.compute.device
        model.train()
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            found = []
            for batch in self.to_weigh:
                with self.compute_loss_context_manager():
                    found.append(pairs_of(model, self._prepare_inputs(batch), self.run.spec))
        own_PK = torch.cat([_as_rows(pairs) for pairs in found])
        all_PK, first = self._of_all_processes(own_PK)
        loss, derivative_PF = derivatives(_of_rows(all_PK, found[0].desirable_P is not None), self.run.spec, totals)
        for batch, pairs in zip(self.to_weigh, found, strict=True):
            stop = first + len(pairs.counts_P2)
            batch["derivatives"] = derivative_PF[first:stop]
            batch["loss"] = loss * len(pairs.counts_P2) / max(len(all_PK), 1)
            first = stop

    def _of_all_processes(self, own_PK: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all processes, in their order, and where this one's begin."""
        if self.args.world_size == 1:
            return own_PK, 0
        sizes = self.accelerator.gather(torch.full((1,), len(own_PK), device=own_PK.device)).tolist()
        padded = own_PK.new_zeros(max(sizes), own_PK.shape[1])
        padded[: len(own_PK)] = own_PK
        gathered = self.accelerator.gather(padded[None])
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes)]), sum(sizes[: self.args.process_index])

    def watch(self) -> None:
        """Read the steps that are done, in all processes at once, and tell what is seen for the first time."""
        for sums in self.tally.read(self.accelerator.gather if self.args.world_size > 1 else None):
            self.unlogged.append(sums)
            for text in self.course.step(added(sums)):
                if self.is_world_process_zero():
                    print(f"warning: {text}", flush=True)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Add the means of the pairs since the last line."""
        if "loss" in logs:
            self.watch()
            if self.unlogged:
                told = means(added([sums for step in self.unlogged for sums in step]), self.run.spec)
                logs |= told | by_source(self.unlogged, self.run.spec)
            self.unlogged = []
        super().log(logs, *arguments, **keywords)

    def _save_checkpoint(self, model, trial):
        self.watch()
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = self.run.checkpoints / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / COURSE).write_text(json.dumps(self.course.state()), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.course.restore(json.loads((Path(resume_from_checkpoint) / COURSE).read_text(encoding="utf-8")))

    def conclusions(self):
        self.watch()
        warnings = self.course.at_end()
        for found in warnings:
            if found["at_end"] and self.is_world_process_zero():
                print(f"warning, at the end: {found['at_end']['text']}", flush=True)
        stopped = {"stopped": self.course.stopped} if self.course.stopped else {}
        return stopped, stopped | {"warnings": warnings}


class _StepEnds(TrainerCallback):
    """Closes a step's sums, and ends the training where `stop_if` says so."""

    def __init__(self, trainer: DpoTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **_):
        asked = self.trainer.run.spec.stop_if
        if not asked or not state.is_world_process_zero:
            return
        if (first := max(asked.window, asked.from_step)) >= state.max_steps:
            print(
                f"note: stop_if looks at this training from step {first} on (window {asked.window}, from_step "
                f"{asked.from_step}), and it has {state.max_steps}: it never ends it early",
                flush=True,
            )
        labels = self.trainer.rows.kinds_of_labels
        if len(labels) == 1:
            have = "good" if labels == {True} else "bad"
            print(f"note: all completions are {have}: there is no margin, and no reward of the other side", flush=True)

    def on_step_end(self, args, state, control, **_):
        trainer = self.trainer
        trainer.tally.end_step()
        if not trainer.run.spec.stop_if or state.global_step >= state.max_steps:
            return
        trainer.watch()
        if verdict := trainer.course.verdict():
            trainer.course.stopped = verdict
            if state.is_world_process_zero:
                print(f"stopped early, after step {verdict['step']}: {verdict['reason']}", flush=True)
            # A checkpoint of this step would be gone on from: who comes back replays it from the one before, and stops again.
            control.should_training_stop = control.should_log = True
            control.should_save = False


def _as_rows(pairs: Pairs) -> torch.Tensor:
    """float32[P, K], as processes hand it to each other; counts below 2^24 are exact in it."""
    desirable = [] if pairs.desirable_P is None else [pairs.desirable_P[:, None]]
    columns = (features(pairs), pairs.reference_P2, pairs.counts_P2, *desirable)
    return torch.cat([column.float() for column in columns], dim=1)


def _of_rows(rows_PK: torch.Tensor, labelled: bool) -> Pairs:
    return Pairs(
        logps_P2=rows_PK[:, :2],
        nll_P2=rows_PK[:, 2:4],
        reference_P2=rows_PK[:, 4:6],
        counts_P2=rows_PK[:, 6:8].long(),
        desirable_P=rows_PK[:, 8] > 0 if labelled else None,
    )


def train_on(
    run: TrainingRun, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None
) -> Outcome:
    """Train on packed pairs, from the model that is their reference unless another one is, or none is needed."""
    return pipeline.train(*begin(run, results, pack, ref_logps))


def begin(
    run: TrainingRun, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None
) -> PreparedTraining:
    """What a training of these begins with; raises SnaketuneError if the log-probabilities aren't of its reference."""
    spec, tokenizer = run.spec, results[0].folder
    base_layers = results[1:] if spec.continued else results
    start = Stack(results=base_layers, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code)
    run = run.with_kernel_for(start.config(), dropout=DpoTrainer.drops_out)
    if ref_logps:
        check_ref_logps(
            ref_logps, spec, model=results, pack=pack, compute=run.compute, any_kernel=run.operation.share_kernels
        )
    elif spec.needs_reference:
        raise SnaketuneError(f"loss {spec.loss} needs reference log-probabilities (--ref-logps); got none")
    if spec.continued:
        # The uppermost result's adapter is put on its base layers, where it is trained further.
        check_trained_on(results[0], base_layers)
        run = replace(run, adapter=tokenizer / ADAPTER)
    rows = PairRows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha)
    return PreparedTraining(DpoTrainer, rows, run, start.load, start.config(), start.named_base)
