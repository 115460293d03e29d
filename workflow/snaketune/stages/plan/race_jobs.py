"""The `race` jobs, which compare the variants of a grid, and the evaluations that they compare.

    V@0.1 ─ eval ┐                    V@0.3 ─ eval ┐
    W@0.1 ─ eval ┴ race@0.1 ┬──────── W@0.3 ─ eval ┴ race@0.3 ┬─ V
                            └ V@0.3, W@0.3                    └─ W

A training waits for the race before it, which may pause it (`stages.races`).
"""

from snaketune.config.evaluations import Evaluation, ExactMatch, Generation
from snaketune.config.held_out import snapshot_name
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, cached
from snaketune.stages.plan.eval_jobs import eval_job
from snaketune.stages.specs import RaceSpec


def race_before(context: Context, stage: str, name: str) -> Job | None:
    """Return the last race that may pause a run before its end; None if there is none."""
    runs, variant = getattr(context.config, stage), name.partition("@")[0]
    if variant not in runs or not (race := runs[variant].race):
        return None
    passed = [rung for rung in race.rungs if rung < (runs[name].training.until or 1.0)]
    grid = next(grid for grid, made in context.variants[stage].items() if variant in made)
    return _race_job(context, stage, grid, passed[-1]) if passed else None


@cached
def _race_job(context: Context, stage: str, grid: str, rung: float) -> Job:
    variants = context.variants[stage][grid]
    run = getattr(context.config, stage)[variants[0]]
    race, name = run.race, f"{stage}-{grid}"
    models = [f"{stage}:{snapshot_name(variant, rung)}" for variant in variants]
    rows = {"conversations" if stage == "sft" else "preferences": (run.corpus,)}
    # As few responses as can be.
    evaluation = Evaluation(
        models=tuple(models),
        packing=run.packing.model_copy(update={"order": "shuffled"}),
        generation=Generation(max_new_tokens=1),
        exact_match=ExactMatch(limit=1),
        samples=1,
        **rows,
    )
    evaluated = tuple(eval_job(context, f"race-{name}", evaluation, model) for model in models)
    earlier = [one for one in race.rungs if one < rung][-1:]
    return context.plan(
        "race",
        snapshot_name(name, rung),
        RaceSpec(
            metric=race.metric,
            keep=race.keep,
            tolerance=race.tolerance,
            looks=len(race.rungs),
            rung=rung,
            runs=tuple(f"{stage}/{variant}" for variant in variants),
        ),
        {
            "snapshots": tuple(context.jobs[stage, snapshot_name(variant, rung)] for variant in variants),
            "evaluated": evaluated,
            "before": tuple(_race_job(context, stage, grid, one) for one in earlier),
        },
    )
