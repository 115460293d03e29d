"""The `dpo` stage: preference optimization on packed pairs, against reference log-probabilities from their artifact where the
loss has a reference; in launched processes.

The prompt of a pair is computed once for both completions, and no reference model is in memory. What the loss of an optimizer
step is, and where it takes two passes, says `step_loss`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.models.stacked import ADAPTER, Stack, check_trained_on
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec
from snaketune.stages.work import WorkFolder
from snaketune.tracking.curves import Tracked
from snaketune.training import pipeline
from snaketune.training.dpo_trainer import DpoTrainer
from snaketune.training.launched import is_first_process
from snaketune.training.pairs import PairRows
from snaketune.training.pipeline import Begun
from snaketune.training.reference import check_ref_logps
from snaketune.training.trainer import Run


def build(
    spec: DpoSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    pack: Artifact,
    ref_logps: Sequence[Artifact] = (),
    beneath: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    tracked: Tracked | None = None,
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer; or with an adapter in their place.

    Args:
        ref_logps: one, or none for a loss without a reference.
        beneath, base: what lies beneath the model, if that is an adapter alone.
    """
    for result in (model, *beneath):
        result.files()
    outcome = train_on(Run.of(spec, operation, work, tracked), (model, *beneath), pack, *ref_logps)
    if is_first_process():
        for name in model.manifest["payload"]:
            # The tokenizer comes along; weights, and an index that tells how they were split, are this run's own.
            weights = name.endswith((".safetensors", ".index.json"))
            if "/" not in name and not weights and not (work.payload / name).exists():
                shutil.copyfile(model.folder / name, work.payload / name)
    return outcome


def train_on(run: Run, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None) -> Outcome:
    """Train on packed pairs, from the model that is their reference unless another one is, or none is needed."""
    return pipeline.train(*begin(run, results, pack, ref_logps))


def begin(run: Run, results: tuple[Artifact, ...], pack: Artifact, ref_logps: Artifact | None = None) -> Begun:
    """What a training of these begins with; raises SnaketuneError if the log-probabilities aren't of its reference."""
    spec, tokenizer = run.spec, results[0].folder
    beneath = results[1:] if spec.continued else results
    start = Stack(results=beneath, base=spec.base, tokenizer=tokenizer, trust_remote_code=spec.trust_remote_code)
    run = run.suited(start.config(), dropout=DpoTrainer.drops_out)
    if ref_logps:
        check_ref_logps(
            ref_logps, spec, model=results, pack=pack, compute=run.compute, any_kernel=run.operation.share_kernels
        )
    elif spec.needs_reference:
        raise SnaketuneError(f"loss {spec.loss} needs reference log-probabilities (--ref-logps); got none")
    if spec.continued:
        # The uppermost result's adapter is put upon what lies beneath it, where it is trained further.
        check_trained_on(results[0], beneath)
        run = replace(run, adapter=tokenizer / ADAPTER)
    rows = PairRows(pack, ref_logps, run.operation.load_in_memory, spec.ld_alpha)
    return Begun(DpoTrainer, rows, run, start.load, start.config(), start.named_base)
