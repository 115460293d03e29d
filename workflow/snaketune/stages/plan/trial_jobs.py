"""The jobs that search for settings which make a run faster: `diagnosis`, `audit`, and the `trial` jobs that both compare."""

from dataclasses import replace
from typing import Any

from snaketune.config.diagnose import BASELINE, LEARNING_RATES, slow_settings, variants_of
from snaketune.config.held_out import Selection
from snaketune.config.training_runs import Dpo, Sft
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, first_run, kind_of, sft_below
from snaketune.stages.plan.data_jobs import tokenizer_job
from snaketune.stages.plan.dpo_jobs import reference_jobs
from snaketune.stages.plan.training_jobs import calibrate_job, preflight_job, training_job
from snaketune.stages.specs import AuditSpec, DiagnosisSpec, DpoSpec, SftSpec, TrialSpec, Variant, spec_from


def diagnosis_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `diagnose:`, after its trials."""
    diagnosis = context.config.diagnose[name]
    section, _, of = diagnosis.run.partition(":")
    runs = diagnosis.variants(name, getattr(context.config, section)[of])
    steps = diagnosis.model_dump(include={"steps", "warmup_steps"})
    trials = _trial_jobs(context, name, of, runs, diagnosis.repeats, **steps) if diagnosis.changes else ()
    tested: tuple[Job, ...] = ()
    if diagnosis.learning_rates:
        # The first step begins the only window that isn't measured.
        steps = {"steps": diagnosis.steps - 1, "warmup_steps": 1, "learning_rates": diagnosis.learning_rates}
        tested = _trial_jobs(context, name, of, {LEARNING_RATES: runs[BASELINE]}, 1, after=trials[-1:], **steps)
    spec = spec_from(DiagnosisSpec, diagnosis, variants=_variants(diagnosis.changes) if diagnosis.changes else ())
    return context.plan("diagnosis", name, spec, {"trials": trials, "learning_rates": tested})


def audit_jobs(context: Context) -> None:
    """Plan an audit of each run; of runs that take the same time and memory, only of the first by name."""
    audited: set[tuple[str, str]] = set()
    for section, runs in (("dpo", context.config.dpo), ("sft", context.config.sft)):
        for name, run in sorted(runs.items()):
            calibration = calibrate_job(context, name, run, context.jobs[section, name].spec)
            costs = calibration.name, str(run.training.micro_batch_rows)
            if costs not in audited:
                _audit_job(context, section, name, run, calibration)
            audited.add(costs)


def _audit_job(context: Context, section: str, name: str, run: Sft | Dpo, calibration: Job) -> Job:
    job, changes = context.jobs[section, name], slow_settings(run)
    runs = variants_of("doctor", changes, run)
    prefix = f"doctor-{section}-{name}"
    trials = _trial_jobs(context, prefix, name, runs, 1, profiled=BASELINE, steps=20, warmup_steps=3)
    spec = spec_from(
        AuditSpec,
        run.training,
        key=f"{section}.{name}",
        kind=kind_of(run),
        training=job.spec.training,
        variants=_variants(changes),
    )
    preflight = preflight_job(context, first_run(context.config, sft_below(name, run)))
    artifacts = {"pack": job.artifacts["pack"], "preflight": (preflight,), "calibrate": (calibration,)}
    return context.plan("audit", f"{section}-{name}", spec, artifacts | {"trials": trials})


def _trial_jobs(
    context: Context,
    name: str,
    of: str,
    runs: dict[str, Sft | Dpo],
    repeats: int,
    profiled: str = "",
    after: tuple[Job, ...] = (),
    **steps: Any,
) -> tuple[Job, ...]:
    """Return the jobs of short timed trainings: each variant once per round, each after the one before it.

    In parallel they would slow each other down, even on different GPUs. Args: of: the name of the run that is varied; runs: its
    variants by name; profiled: the variant that is profiled; after: the job before the first; steps: fields of the specs.
    """
    trials: list[Job] = []
    for repeat in range(1, repeats + 1):
        for variant, run in runs.items():
            references = reference_jobs(context, run) if isinstance(run, Dpo) else ()
            tokenizer = tokenizer_job(context, context.config.tokenizer_of(run))
            inputs = {"tokenizer": (tokenizer,), "ref_logps": references}
            job = training_job(context, "trial", f"{name}/{variant}/{repeat}", of, run, **inputs)
            own = {"run": timed_spec(job.spec), "repeat": repeat, "profile": variant == profiled}
            spec = spec_from(TrialSpec, run.training, run.operation, **own, **steps)
            trials.append(context.add(replace(job, spec=spec, after=(*job.after, *(trials[-1:] or after)))))
    return tuple(trials)


def timed_spec(spec: SftSpec | DpoSpec) -> SftSpec | DpoSpec:
    """Return the spec of a training without what measures held-out rows or ends it early: a trial takes its own steps."""
    without = {name: field.default for name, field in Selection.model_fields.items() if name != "average"}
    ends = {"stop_if": None} if isinstance(spec, DpoSpec) else {}
    return spec.model_copy(update={"training": spec.training.model_copy(update=without), **ends})


def _variants(changes: dict[str, dict[str, Any]]) -> tuple[Variant, ...]:
    """Return the baseline and its changes, in the order of their trials."""
    return (Variant(name=BASELINE), *(Variant(name=name, changes=change) for name, change in changes.items()))
