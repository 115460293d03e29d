"""Preparation of a preference training: its pairs with their reference log-probabilities, and its initial weights."""

from collections.abc import Sequence
from dataclasses import fields, replace

from snaketune.artifacts.manifest import Artifact
from snaketune.engine.dpo import DpoTrainer
from snaketune.engine.model.packing_support import with_supported_kernel
from snaketune.engine.preference_settings import PreferenceSettings, StopIf, weights_by_loss
from snaketune.errors import SnaketuneError
from snaketune.models.adapter_stack import ADAPTER, AdapterStack, check_trained_on
from snaketune.stages.specs import DpoSpec
from snaketune.training.pair_rows import pair_rows
from snaketune.training.prepared import PreparedTraining, TrainingRun
from snaketune.training.reference.logps_table import check_computed_alike

# Keys of `dpo.NAME.stop_if` that are thresholds.
THRESHOLDS = {"margin_below", "chosen_reward_below", "kl_above"}


def prepare_dpo(
    run: TrainingRun,
    results: tuple[Artifact, ...],
    pack: Artifact,
    ref_logps: Artifact | None = None,
    reference: Sequence[Artifact] = (),
) -> PreparedTraining:
    """Prepare a training on packed pairs, whose initial weights are also the reference, unless the spec names another.

    Args:
        results: the result that it starts from and, if it is an adapter alone, its base layers, from the top down.
        reference: the same of the reference, if the spec says that it is another result; empty for an external model.
        ref_logps: the reference log-probabilities; required if the loss needs a reference.
    Raises:
        SnaketuneError: the log-probabilities are missing, or don't belong to this run's reference.
    """
    spec, tokenizer = run.spec, results[0].folder
    base_layers = results[1:] if spec.continued else results
    initial = AdapterStack(
        results=base_layers, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code
    )
    run = replace(run, compute=with_supported_kernel(run.compute, initial.config(), dropout=DpoTrainer.drops_out))
    # Before the rows are read, which are those of the pairs that the log-probabilities are for.
    if ref_logps:
        model = reference if spec.reference else results
        pairs, shared = pack.provenance.get("pairs"), run.operation.share_kernels
        check_computed_alike(ref_logps, run.compute, model=model, pairs=pairs, share_kernels=shared)
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
    prepared = PreparedTraining(
        trainer_class=DpoTrainer,
        rows=rows,
        run=run,
        initial=initial,
        held_out=held_out,
        loss={"settings": preference_settings(spec)},
    )
    return prepared.with_kernel()


def preference_settings(spec: DpoSpec) -> PreferenceSettings:
    """The losses of a spec and their parameters, for the engine."""
    stop_if = None
    if limits := spec.stop_if:
        thresholds = limits.model_dump(include=THRESHOLDS, exclude_none=True)
        stop_if = StopIf(thresholds=thresholds, from_step=limits.from_step, window=limits.window)
    names = {field.name for field in fields(PreferenceSettings)} & type(spec).model_fields.keys() - {"stop_if"}
    return PreferenceSettings(
        weights=weights_by_loss(spec.loss),
        stop_if=stop_if,
        external_reference=spec.reference is not None,
        **{name: getattr(spec, name) for name in names},
    )
