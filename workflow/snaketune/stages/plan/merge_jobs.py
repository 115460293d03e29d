"""The `merge` jobs."""

from snaketune.config.references import sft_of
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, cached, trusts_remote_code
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.training_jobs import sft_job, weights_of
from snaketune.stages.specs import MergedModel, MergeSpec


@cached
def merge_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `merge:`."""
    config, merge = context.config, context.config.merge[name]
    models, results, files = [], [], []
    for model, weight in merge.models.items():
        kind, run = model.split(":")
        job = dpo_job(context, run) if kind == "dpo" else sft_job(context, run)
        weights = weights_of(context, getattr(config, kind)[run], job)
        models.append(MergedModel(weight=weight, results=len(weights.results), base=weights.base))
        results += weights.results
        files += weights.files
    trusted = any(trusts_remote_code(config, sft_of(config, *model.split(":"))) for model in merge.models)
    return context.plan(
        "merge",
        name,
        MergeSpec(models=tuple(models), method=merge.method, trust_remote_code=trusted),
        {"models": tuple(results)},
        files={"base": tuple(dict.fromkeys(files))},
    )
