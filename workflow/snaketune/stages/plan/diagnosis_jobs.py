"""The jobs that search for settings which make a run faster: `diagnosis`, `audit`, and the `trial` jobs that both compare."""

from dataclasses import replace
from itertools import product
from typing import Any

from snaketune.config.diagnose import BASELINE, slow_settings, variants_of
from snaketune.config.training_runs import Dpo, Sft
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, planned
from snaketune.stages.plan.dpo_jobs import reference_jobs
from snaketune.stages.plan.run_settings import kind_of
from snaketune.stages.plan.training_jobs import training, training_of
from snaketune.stages.specs import AuditSpec, DiagnosisSpec, TrialSpec, Variant


@planned
def diagnosis_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `diagnose:`, after its trials."""
    diagnosis = context.config.diagnose[name]
    section, _, of = diagnosis.run.partition(":")
    runs = diagnosis.variants(name, getattr(context.config, section)[of])
    steps = diagnosis.model_dump(include={"steps", "warmup_steps"})
    trials = _trial_jobs(context, name, of, runs, diagnosis.repeats, **steps)
    spec = DiagnosisSpec(mode=diagnosis.mode, variants=_variants(diagnosis.changes), repeats=diagnosis.repeats)
    return Job(stage="diagnosis", name=name, spec=spec, artifacts={"trials": trials})


def audit_jobs(context: Context) -> None:
    """Plan an audit of each run; of runs that take the same time and memory, only of the first by name."""
    audited: set[tuple[str, str]] = set()
    for section, runs in (("dpo", context.config.dpo), ("sft", context.config.sft)):
        for name, run in sorted(runs.items()):
            costs = training(context, section, name).calibration.name, str(run.training.micro_batch_rows)
            if costs not in audited:
                _audit_job(context, section, name)
            audited.add(costs)


def _audit_job(context: Context, section: str, name: str) -> Job:
    audited = training(context, section, name)
    run, changes = audited.run, slow_settings(audited.run)
    runs = variants_of("doctor", changes, run)
    trials = _trial_jobs(
        context, f"doctor-{section}-{name}", name, runs, 1, profiled=BASELINE, steps=20, warmup_steps=3
    )
    spec = AuditSpec(
        key=f"{section}.{name}",
        kind=kind_of(run),
        training=audited.spec.training,
        **run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"}),
        variants=_variants(changes),
    )
    artifacts = {"pack": (audited.pack,), "preflight": (audited.preflight,), "calibrate": (audited.calibration,)}
    return context.add(
        Job(stage="audit", name=f"{section}-{name}", spec=spec, artifacts=artifacts | {"trials": trials})
    )


def _trial_jobs(
    context: Context, name: str, of: str, runs: dict[str, Sft | Dpo], repeats: int, profiled: str = "", **steps: int
) -> tuple[Job, ...]:
    """Return the jobs of short timed trainings: each variant once per round, each after the one before it.

    In parallel they would slow each other down, even on different GPUs.

    Args:
        of: the name of the run that is varied.
        runs: its variants by name.
        profiled: the variant that is profiled.
        steps: steps and warmup_steps of the specs.
    """
    trials: list[Job] = []
    for repeat, (variant, run) in product(range(1, repeats + 1), runs.items()):
        references = reference_jobs(context, run) if isinstance(run, Dpo) else ()
        trial = training_of(context, of, run)
        job = trial.job("trial", f"{name}/{variant}/{repeat}", tokenizer=(trial.tokenizer,), ref_logps=references)
        spec = TrialSpec(
            run=trial.spec,
            **run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"}),
            **run.operation.model_dump(include={"launch", "zero_stage", "load_in_memory"}),
            processes=run.operation.processes,
            repeat=repeat,
            profile=variant == profiled,
            **steps,
        )
        trials.append(context.add(replace(job, spec=spec, after=(*job.after, *trials[-1:]))))
    return tuple(trials)


def _variants(changes: dict[str, dict[str, Any]]) -> tuple[Variant, ...]:
    """Return the baseline and its changes, in the order of their trials."""
    return (Variant(name=BASELINE), *(Variant(name=name, changes=change) for name, change in changes.items()))
