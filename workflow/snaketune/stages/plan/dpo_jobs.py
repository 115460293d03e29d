"""The `dpo` jobs, and the `ref_logps` and `ref_pass` jobs that compute the log-probabilities of their references.

The config doesn't name the latter two: they are named after model and pack with a digest of the spec, and runs share them.
"""

from dataclasses import replace
from typing import Any

from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Dpo
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.data_jobs import (
    Context,
    Weights,
    cached,
    pack_name,
    pack_of,
    tokenizer_job,
    trusts_remote_code,
)
from snaketune.stages.plan.passes import named_weights, plan_pass
from snaketune.stages.plan.training_jobs import (
    base_of_model,
    base_of_start,
    start_of,
    training_job,
)
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec, canonical

# Name of the reference, name of the pack, and spec: runs with equal keys share the log-probabilities.
Key = tuple[str, str, str]


@cached
def dpo_job(context: Context, name: str) -> Job:
    run = context.config.dpo[name]
    job = training_job(context, "dpo", name, name, run)
    return context.add(replace(job, artifacts=job.artifacts | reference_artifacts(context, run)))


def reference_artifacts(context: Context, run: Dpo) -> dict[str, tuple[Job, ...]]:
    """By role, what a run reads of its reference: the log-probabilities, and the model itself if that is another result."""
    model = reference_weights(context, run).results if isinstance(run.reference, str) else ()
    return {"ref_logps": _reference_jobs(context, run), "reference": model}


def _reference_jobs(context: Context, run: Dpo) -> tuple[Job, ...]:
    """The job of the reference log-probabilities that a run reads; none if its loss has no reference."""
    return (_ref_logps_job(context, _key(context, run)),) if run.needs_reference else ()


@cached
def _ref_logps_job(context: Context, key: Key) -> Job:
    """The job for all runs that share the log-probabilities.

    Log-probabilities with and without the values of single tokens are two results, so that adding a run that needs them doesn't
    change those of other runs. If a config needs both, those without are taken from those with them, which are computed first.
    """
    runs = _runs_by_reference(context)[key]
    run = runs[0]
    pack, spec = pack_of(context, run), _spec(context, run)
    detailed = _key(context, run, token_logps=True)
    first = (_ref_logps_job(context, detailed),) if detailed != key and detailed in _runs_by_reference(context) else ()
    of = _reference_name(run)
    name = f"{of.removeprefix('dpo:')}-{pack.name}-{short_digest(spec, of, pack.name)}"
    model = reference_weights(context, run)
    external = isinstance(run.reference, Pretrained)
    tokenizer = (tokenizer_job(context, context.config.tokenizer_of(run)),) if external else ()
    inputs = {
        "artifacts": model.artifacts | {"pack": (pack,), "tokenizer": tokenizer},
        "files": {"base": model.files},
    }
    operation = Execution(
        gpus=max(min(dpo.operation.gpus, 1) for dpo in runs),
        allow_cpu=any(dpo.operation.allow_cpu for dpo in runs),
        # A run that doesn't share kernels refuses what another kernel computed.
        share_kernels=all(dpo.reference_pass.share_kernels for dpo in runs),
    )
    parts = max(dpo.reference_pass.parts for dpo in runs)
    specs = spec, RefPassSpec
    return plan_pass(context, ("ref_logps", "ref_pass"), name, specs, parts, operation, after=first, **inputs)


@cached
def _runs_by_reference(context: Context) -> dict[Key, list[Dpo]]:
    """The runs, and the variants of runs that are timed, by the reference that they share."""
    config = context.config
    timed = (config.doctor.variants(run) for name, run in config.dpo.items() if config.doctor.examines("dpo", name))
    shared: dict[Key, list[Dpo]] = {}
    for runs in (config.dpo, *timed):
        for run in runs.values():
            if isinstance(run, Dpo) and run.needs_reference:
                shared.setdefault(_key(context, run), []).append(run)
    return shared


def reference_weights(context: Context, run: Dpo) -> Weights:
    """The reference of a run: the model that it starts from, unless it names another."""
    return named_weights(context, run.reference) if run.reference else start_of(context, run)


def _reference_name(run: Dpo) -> str:
    """The result that a run's reference is named after: `NAME` of an SFT run, or `dpo:NAME`."""
    return (run.reference if isinstance(run.reference, str) else run.start).removeprefix("sft:")


def _key(context: Context, run: Dpo, **changes: bool) -> Key:
    """The key of a run's reference. Args: changes: of the spec."""
    spec = _spec(context, run).model_copy(update=changes)
    return _reference_name(run), pack_name(context.config, run), canonical(spec)


def _spec(context: Context, run: Dpo) -> RefLogpsSpec:
    config = context.config
    trusted = trusts_remote_code(config, config.sft_below(run))
    if run.reference:
        # With its published weights, whatever the runs train, so that all of them share it.
        model: dict[str, Any] = {"frozen_weights": True, "quantization": None}
        if isinstance(run.reference, Pretrained):
            model["base"], trusted = run.reference, run.reference.trust_remote_code
        else:
            model["base"] = base_of_model(config, run.reference)
    else:
        model = {"frozen_weights": run.lora is not None, "quantization": run.quantization}
        model |= {"base": base_of_start(config, run), "apart": run.lora == "continued"}
    return RefLogpsSpec(
        precision=run.training.precision,
        trust_remote_code=trusted,
        token_logps=run.reference_pass.token_logps or run.ld_alpha is not None,
        **model,
    )
