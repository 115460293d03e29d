"""The trainer of packed pairs: checks before the first step, the loss of a step, metrics, and early stopping."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.model.batches import collate
from snaketune.engine.model.packing_support import with_supported_kernel
from snaketune.engine.packed_trainer import PackedTrainer
from snaketune.engine.pair_logps import PairLogps, pair_logps
from snaketune.engine.preference_losses import derivatives, loss_of, needs_prompts, needs_whole_step
from snaketune.engine.preference_metrics import SUMS, MetricSums, Sums, add_steps, batch_sums, by_source, means
from snaketune.engine.preference_monitor import DpoMonitor
from snaketune.engine.trainer import PreparedTraining, TrainingRun
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, check_trained_on
from snaketune.stages.outcome import Outcome
from snaketune.training.pair_rows import pair_rows
from snaketune.training.reference.logps_table import check_policy_is_reference, check_ref_logps

METRICS_STATE = "dpo_metrics.json"
# Columns of a row that have an entry per pair.
PAIR_COLUMNS = ("reference", "source", "desirable")


class DpoTrainer(PackedTrainer):
    """Trainer with a preference loss on pairs, or on labelled single completions."""

    # The reference log-probabilities were computed without dropout.
    drops_out = False
    sums_losses = False

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.spec = self.run.spec
        self.metric_sums = MetricSums(self.spec, self.rows.sources)
        self.monitor = DpoMonitor(self.spec, from_zero=self.spec.reference is None)
        # Sums of the steps since the last log line, per step and source.
        self.unlogged: list[list[Sums]] = []
        # For a loss over a whole step: its micro-batches, between `get_batch_samples` and the first `training_step`.
        self.step_batches: list[dict[str, Any]] = []

    def counts(self):
        return super().counts() | {"pairs": self.rows.pairs}

    def collate(self, rows, kernel, longest=None):
        batch = collate(rows, kernel, longest, prompts=needs_prompts(self.run.spec))
        counts_C = batch["completion_tokens"]
        pairs = {name: torch.cat([row[name] for row in rows]) for name in PAIR_COLUMNS if name in rows[0]}
        # Counted on the host, so that no step waits for the device.
        items = (len(pairs["reference"]), int(counts_C[::2].sum()), len(batch.get("sequence_members", ())))
        return batch | pairs | {"items": items}

    def items(self, batch):
        return batch["items"]

    def check_start(self):
        if not self.spec.needs_reference:
            return
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        ratios = []
        for training in (True, False):
            self.model.train(training)
            # At the precision of the reference log-probabilities.
            with torch.no_grad(), self.as_in_training(step_precision=False):
                pairs = pair_logps(self.model, batch, self.spec)
            ratios.append(pairs.ratios_P2)
        self.model.train()
        external = self.spec.reference is not None
        check_policy_is_reference(*ratios, pairs.counts_P2, self.run.compute.dtype, external=external)

    def batch_loss(self, model, batch, totals):
        pairs = pair_logps(model, batch, self.spec)
        self.metric_sums.add(pairs, batch["source"])
        if "derivatives" not in batch:
            return loss_of(pairs, self.spec, totals)
        share = (pairs.features_PF * batch["derivatives"]).sum()
        # The gradient of `share`, the value of the micro-batch's share of the step's loss.
        return share + (batch["loss"] - share).detach()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, totals = super().get_batch_samples(epoch_iterator, num_batches, device)
        if needs_whole_step(self.spec) and (len(batches) > 1 or self.args.world_size > 1):
            self.step_batches = batches
        return batches, totals

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.step_batches:
            # Not in `get_batch_samples`: a resumed training restores its random states only after that.
            self._add_derivatives(model, num_items_in_batch)
            self.step_batches = []
        return super().training_step(model, inputs, num_items_in_batch)

    @torch.no_grad()
    def _add_derivatives(self, model: torch.nn.Module, totals: torch.Tensor) -> None:
        """Add to each micro-batch the derivatives of the step's loss with respect to its log-probabilities.

        Its own forward pass computes these again with a graph, from the same random states, so with the same adapter dropout.
        """
        model.train()
        step_pairs = []
        with self.as_in_training(autocast=False):
            for batch in self.step_batches:
                with self.compute_loss_context_manager():
                    step_pairs.append(pair_logps(model, self._prepare_inputs(batch), self.spec))
        all_PK, first = self._gather_rows(torch.cat([_as_rows(pairs) for pairs in step_pairs]))
        every = _from_rows(all_PK, labelled=step_pairs[0].desirable_P is not None)
        loss, derivative_PF = derivatives(every, self.spec, totals)
        for batch, pairs in zip(self.step_batches, step_pairs, strict=True):
            stop = first + len(pairs.counts_P2)
            batch["derivatives"] = derivative_PF[first:stop]
            batch["loss"] = loss * len(pairs.counts_P2) / max(len(all_PK), 1)
            first = stop

    def held_out_metrics(self, batches):
        own, sources, totals = [], [], torch.zeros(3, dtype=torch.int64)
        for batch in batches:
            own.append(_as_rows(pair_logps(self.model_wrapped, batch, self.spec)))
            sources.append(batch["source"][:, None].float())
            totals += torch.tensor(batch["items"])
        all_PK, _ = self._gather_rows(torch.cat([torch.cat(own), torch.cat(sources)], dim=1))
        if self.args.world_size > 1:
            totals = self.accelerator.gather(totals[None].to(self.args.device)).sum(0)
        pairs = _from_rows(all_PK[:, :-1], labelled=self.rows.unpaired)
        loss = loss_of(pairs, self.spec, totals.to(self.args.device))
        of_sources = batch_sums(pairs, self.spec, all_PK[:, -1].long(), self.held_out.rows.sources).tolist()
        sums = [dict(zip(SUMS, row)) for row in of_sources]
        return {"loss": float(loss)} | means(add_steps(sums), self.spec) | by_source([sums], self.spec)

    def _gather_rows(self, own_PK: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all processes in the order of their ranks, and the index of this process' first row."""
        if self.args.world_size == 1:
            return own_PK, 0
        sizes = self.accelerator.gather(torch.full((1,), len(own_PK), device=own_PK.device)).tolist()
        gathered = self.accelerator.gather(self.accelerator.pad_across_processes(own_PK)[None])
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes)]), sum(sizes[: self.args.process_index])

    def update_monitor(self) -> None:
        """Pass the metrics of finished steps to the monitor and print its new warnings. A collective operation."""
        for sums in self.metric_sums.read(self.gather_processes):
            self.unlogged.append(sums)
            for text in self.monitor.step(add_steps(sums)):
                print(f"warning: {text}", flush=True)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            self.update_monitor()
            if self.unlogged:
                logs |= means(add_steps(sums for step in self.unlogged for sums in step), self.spec)
                logs |= by_source(self.unlogged, self.spec)
            self.unlogged = []
        super().log(logs, *arguments, **keywords)

    def _save_checkpoint(self, model, trial):
        self.update_monitor()
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = self.run.checkpoints / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            state = {"monitor": self.monitor.state(), "unlogged": self.unlogged}
            (folder / METRICS_STATE).write_text(json.dumps(state), encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        stored = json.loads((Path(resume_from_checkpoint) / METRICS_STATE).read_text(encoding="utf-8"))
        self.monitor.restore(stored["monitor"])
        self.unlogged = stored["unlogged"]

    def conclusions(self):
        self.update_monitor()
        warnings = self.monitor.final_warnings()
        for warning in warnings:
            if warning["at_end"]:
                print(f"warning, at the end: {warning['at_end']['text']}", flush=True)
        stopped = {"stopped": self.monitor.stopped} if self.monitor.stopped else {}
        return Outcome(about=stopped, run=stopped | {"warnings": warnings})

    def on_train_begin(self, args, state, control, **_):
        if stop_if := self.spec.stop_if:
            if (first := max(stop_if.window, stop_if.from_step)) >= state.max_steps:
                print(
                    f"note: stop_if has no effect: it applies from step {first} on (window {stop_if.window}, from_step "
                    f"{stop_if.from_step}), and this training has {state.max_steps} steps; lower window or from_step",
                    flush=True,
                )
            if len(labels := self.rows.distinct_labels) == 1:
                have = "good" if labels == {True} else "bad"
                print(
                    f"note: all completions are {have}: metrics lack the margin and the rewards of the other side",
                    flush=True,
                )
        super().on_train_begin(args, state, control)

    def on_step_end(self, args, state, control, **_):
        """End the step's sums, and end the training if `stop_if` says so."""
        super().on_step_end(args, state, control)
        self.metric_sums.end_step()
        if not self.spec.stop_if or state.global_step >= state.max_steps:
            return
        self.update_monitor()
        if stopped := self.monitor.early_stop():
            self.monitor.stopped = stopped
            print(f"stopped early, after step {stopped['step']}: {stopped['reason']}", flush=True)
            # A retry would train on from a checkpoint of this step. From the previous one it repeats this step and stops again.
            control.should_training_stop, control.should_save = True, False


def _as_rows(pairs: PairLogps) -> torch.Tensor:
    """Pairs as float32[P, K], the form in which processes exchange them; token counts below 2^24 are exact."""
    desirable = [] if pairs.desirable_P is None else [pairs.desirable_P[:, None]]
    columns = (pairs.features_PF, pairs.reference_P2, pairs.counts_P2, *desirable)
    return torch.cat([column.float() for column in columns], dim=1)


def _from_rows(rows_PK: torch.Tensor, labelled: bool) -> PairLogps:
    return PairLogps(
        logps_P2=rows_PK[:, :2],
        nll_P2=rows_PK[:, 2:4],
        reference_P2=rows_PK[:, 4:6],
        counts_P2=rows_PK[:, 6:8].long(),
        desirable_P=rows_PK[:, 8] > 0 if labelled else None,
    )


def prepare_training(
    run: TrainingRun, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None
) -> PreparedTraining:
    """Prepare a training on packed pairs, whose initial weights are also the reference, unless the spec names another.

    Args:
        results: the SFT result and, if it is an adapter alone, its base layers, from the top down.
        ref_logps: the reference log-probabilities; required if the loss needs a reference.
    Raises:
        SnaketuneError: the log-probabilities are missing, or don't belong to this run's reference.
    """
    spec, tokenizer = run.spec, results[0].folder
    base_layers = results[1:] if spec.continued else results
    initial = AdapterStack(
        results=base_layers, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code
    )
    if not run.has_passed:
        run = replace(run, compute=with_supported_kernel(run.compute, initial.config(), dropout=DpoTrainer.drops_out))
    # Before the rows are read, which are those of the pairs that the log-probabilities are for.
    if ref_logps:
        share_kernels = run.operation.share_kernels
        check_ref_logps(ref_logps, spec, model=results, pack=pack, compute=run.compute, share_kernels=share_kernels)
    elif spec.needs_reference:
        raise SnaketuneError(
            f"loss {spec.loss} needs reference log-probabilities, and the job has none; add a ref_logps result to its inputs"
        )
    if spec.continued:
        # The SFT result's adapter is attached to its base layers and trained further.
        check_trained_on(results[0], base_layers)
        run = replace(run, adapter=tokenizer / ADAPTER)
    rows = pair_rows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha)
    held_out = pair_rows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha, split="held_out")
    prepared = PreparedTraining(trainer_class=DpoTrainer, rows=rows, run=run, initial=initial, held_out=held_out)
    return prepared.with_kernel()
