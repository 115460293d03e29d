"""Preference optimization on packed pairs, or on labelled single completions.

    batch            rows of segments: prompt + chosen; and the rejected completion, a segment whose prefix is the prompt, which
                     is thus computed once (`engine.packing.segments`); and each pair's reference log-probabilities
    log-probs        of each completion under the model, `pair_logps`
    loss             of all pairs of a step, `preference_losses`; some losses need the step's log-probabilities first
    metrics          rewards, margins, lengths, `preference_metrics`; watched by `preference_monitor`

No reference model is in memory: its log-probabilities are columns of the rows.
"""

from typing import Any

import torch

from snaketune.engine.model.batches import Batch, collate, pair_columns
from snaketune.engine.pair_logps import PairLogps, pair_logps
from snaketune.engine.pair_metrics import add_steps
from snaketune.engine.pair_trainer import PairTrainer
from snaketune.engine.preference_losses import derivatives, loss_of, needs_prompts, needs_whole_step
from snaketune.engine.preference_metrics import SUMS, batch_sums, means
from snaketune.engine.preference_monitor import PreferenceMonitor
from snaketune.engine.preference_settings import PreferenceSettings
from snaketune.engine.reference_check import check_policy_is_reference


class DpoTrainer(PairTrainer):
    """Trainer with a preference loss on pairs, or on labelled single completions."""

    sum_names = SUMS

    settings: PreferenceSettings
    # Its window is part of checkpoints.
    monitor: PreferenceMonitor
    # For a loss over a whole step: its micro-batches, between `get_batch_samples` and the first `training_step`.
    step_batches: list[dict[str, Any]]

    def __init__(self, *, settings: PreferenceSettings, **arguments: Any):
        self.step_batches = []
        super().__init__(settings=settings, **arguments)
        self.monitor = PreferenceMonitor(settings, from_zero=not settings.external_reference)

    def check_start(self):
        if not self.settings.needs_reference:
            return
        batch = self._prepare_inputs(self._collate_items([self.train_dataset[0]]))
        ratios = []
        for training in (True, False):
            self.model.train(training)
            # At the precision of the reference log-probabilities.
            with torch.no_grad(), self.as_in_training(step_precision=False):
                pairs = pair_logps(self.model, batch, self.settings)
            ratios.append(pairs.ratios_P2)
        self.model.train()
        external = self.settings.external_reference
        check_policy_is_reference(*ratios, pairs.counts_P2, self.compute.dtype, external=external)

    # A step, in the order of its calls.

    def collate(self, rows, kernel, longest=None) -> Batch:
        batch = collate(rows, kernel, longest, prompts=needs_prompts(self.settings))
        counts_C, columns = batch["completion_tokens"], pair_columns(rows)
        # Counted on the host, so that no step waits for the device: pairs, tokens of chosen completions, and with prompts.
        items = (len(columns["reference"]), int(counts_C[::2].sum()), len(batch.get("sequence_members", ())))
        return batch | columns | {"items": items}

    def items(self, batch):
        return batch["items"]

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, totals = super().get_batch_samples(epoch_iterator, num_batches, device)
        if needs_whole_step(self.settings) and (len(batches) > 1 or self.args.world_size > 1):
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
                    step_pairs.append(pair_logps(model, self._prepare_inputs(batch), self.settings))
        all_PK, first = self.gather_pairs(torch.cat([_as_matrix(pairs) for pairs in step_pairs]))
        gathered_pairs = _from_matrix(all_PK, labelled=step_pairs[0].desirable_P is not None)
        loss, derivative_PF = derivatives(gathered_pairs, self.settings, totals)
        for batch, pairs in zip(self.step_batches, step_pairs, strict=True):
            stop = first + len(pairs.counts_P2)
            batch["derivatives"] = derivative_PF[first:stop]
            batch["loss"] = loss * len(pairs.counts_P2) / max(len(all_PK), 1)
            first = stop

    def batch_loss(self, model, batch, totals):
        pairs = pair_logps(model, batch, self.settings)
        self.metric_sums.add(batch_sums(pairs, self.settings, batch["source"], self.rows.sources))
        if "derivatives" not in batch:
            return loss_of(pairs, self.settings, totals)
        share = (pairs.features_PF * batch["derivatives"]).sum()
        # The gradient of `share`, the value of the micro-batch's share of the step's loss.
        return share + (batch["loss"] - share).detach()

    def on_step_end(self, args, state, control, **_):
        """End the step's sums, and end the training if `stop_if` says so."""
        super().on_step_end(args, state, control)
        if not self.settings.stop_if or state.global_step >= state.max_steps:
            return
        self.read_metrics()
        if stopped := self.monitor.early_stop():
            self.monitor.stopped = stopped
            print(f"stopped early, after step {stopped['step']}: {stopped['reason']}", flush=True)
            # A retry would train on from a checkpoint of this step. From the previous one it repeats this step and stops again.
            control.should_training_stop, control.should_save = True, False

    # Metrics.

    def means(self, sums):
        return means(sums, self.settings)

    def add_step(self, sums):
        """Pass the step's metrics to the monitor and print its new warnings."""
        for text in self.monitor.step(add_steps(sums)):
            print(f"warning: {text}", flush=True)

    def outputs(self, batch):
        return _as_matrix(pair_logps(self.model_wrapped, batch, self.settings))

    def score(self, rows_PK, source_P, sources, totals):
        pairs = _from_matrix(rows_PK, labelled=self.rows.unpaired)
        return loss_of(pairs, self.settings, totals), batch_sums(pairs, self.settings, source_P, sources)

    def on_train_begin(self, args, state, control, **_):
        if not (stop_if := self.settings.stop_if):
            return
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

    def conclusions(self):
        self.read_metrics()
        warnings = self.monitor.final_warnings()
        for warning in warnings:
            if warning["at_end"]:
                print(f"warning, at the end: {warning['at_end']['text']}", flush=True)
        return ({"stopped": self.monitor.stopped} if self.monitor.stopped else {}) | {"warnings": warnings}

    # Checkpoints.

    def metrics_state(self):
        return super().metrics_state() | {"monitor": self.monitor.state()}

    def restore_metrics(self, state):
        super().restore_metrics(state)
        self.monitor.restore(state["monitor"])


def _as_matrix(pairs: PairLogps) -> torch.Tensor:
    """Pairs as float32[P, K], the form in which processes exchange them; token counts below 2^24 are exact."""
    desirable = [] if pairs.desirable_P is None else [pairs.desirable_P[:, None]]
    columns = (pairs.features_PF, pairs.reference_P2, pairs.counts_P2, *desirable)
    return torch.cat([column.float() for column in columns], dim=1)


def _from_matrix(rows_PK: torch.Tensor, labelled: bool) -> PairLogps:
    return PairLogps(
        logps_P2=rows_PK[:, :2],
        nll_P2=rows_PK[:, 2:4],
        reference_P2=rows_PK[:, 4:6],
        counts_P2=rows_PK[:, 6:8].long(),
        desirable_P=rows_PK[:, 8] > 0 if labelled else None,
    )
