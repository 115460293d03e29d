"""The jobs of `snakemake doctor`: a `bottleneck` job for each run, and the `timing` jobs whose results it compares."""

from dataclasses import replace
from typing import Any

from snaketune.config.doctor import BASELINE
from snaketune.config.held_out import Selection
from snaketune.config.training_runs import Dpo, Sft
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, tokenizer_job
from snaketune.stages.plan.dpo_jobs import reference_artifacts
from snaketune.stages.plan.training_jobs import calibrate_job, family_of, preflight_job, run_wave, training_job
from snaketune.stages.specs import BottleneckSpec, DpoSpec, SftSpec, TimingSpec, Variant, spec_from


def doctor_jobs(context: Context) -> None:
    """Plan the examination of each run; of runs that take the same time and memory, only of the first by name."""
    examined: set[tuple[str, str]] = set()
    for section, runs in (("dpo", context.config.dpo), ("sft", context.config.sft)):
        for name, run in sorted(runs.items()):
            calibration = calibrate_job(context, name, run, context.jobs[section, name].spec)
            costs = calibration.name, str(run.training.micro_batch_rows)
            if costs not in examined and context.config.doctor.examines(section, name):
                _bottleneck_job(context, section, name, run, calibration)
                examined.add(costs)


def _bottleneck_job(context: Context, section: str, name: str, run: Sft | Dpo, calibration: Job) -> Job:
    changes = context.config.doctor.tried_on(run)
    tried = (
        Variant(name=variant, changes=change, baseline={key: _value(run, key) for key in change})
        for variant, change in changes.items()
    )
    spec = BottleneckSpec(key=f"{section}.{name}", variants=(Variant(name=BASELINE), *tried))
    inputs = {
        "pack": context.jobs[section, name].artifacts["pack"],
        "preflight": (preflight_job(context, family_of(context, name, run), run_wave(context, run)),),
        "calibrate": (calibration,),
        "timings": _timing_jobs(context, section, name, run),
    }
    return context.plan("bottleneck", f"{section}-{name}", spec, inputs)


def _value(run: Sft | Dpo, key: str) -> Any:
    """The value of a dotted key; None if a section above it is missing."""
    value: Any = run.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _timing_jobs(context: Context, section: str, of: str, run: Sft | Dpo) -> tuple[Job, ...]:
    """The jobs of short timed trainings: each variant once per round, each after the one before it.

    In parallel they would slow each other down, even on different GPUs. Args: of: the name of the run that is varied.
    """
    doctor = context.config.doctor
    variants = doctor.variants(run)
    timings: list[Job] = []
    for repeat in range(1, doctor.repeats + 1 if len(variants) > 1 else 2):
        for variant, varied in variants.items():
            references = reference_artifacts(context, varied) if isinstance(varied, Dpo) else {}
            tokenizer = tokenizer_job(context, context.config.tokenizer_of(varied))
            inputs = {"tokenizer": (tokenizer,)} | references
            job = training_job(context, "timing", f"{section}-{of}/{variant}/{repeat}", of, varied, **inputs)
            spec = spec_from(
                TimingSpec,
                varied.training,
                varied.operation,
                run=timed_spec(job.spec),
                repeat=repeat,
                steps=doctor.steps,
                profile=variant == BASELINE and repeat == 1,
            )
            timings.append(context.add(replace(job, spec=spec, after=(*job.after, *timings[-1:]))))
    return tuple(timings)


def timed_spec(spec: SftSpec | DpoSpec) -> SftSpec | DpoSpec:
    """The spec of a training without what measures held-out rows or ends it early: a timing takes its own steps."""
    without = {name: field.default for name, field in Selection.model_fields.items() if name != "average"}
    # What a teacher adds isn't timed.
    ends: dict[str, None] = {"stop_if": None} if isinstance(spec, DpoSpec) else {"distill": None}
    return spec.model_copy(update={"training": spec.training.model_copy(update=without), **ends})
