"""The `dpo` jobs, and the `ref_logps` and `ref_pass` jobs that compute the log-probabilities of their references.

The config doesn't name the latter two: they are named after model and pack with a digest of the spec, and runs share them.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from snaketune.config.base_models import Pretrained
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Dpo
from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import Context, Weights, cached, pack_name, pack_of, tokenizer_job
from snaketune.stages.plan.passes import allows_code_of, named_weights, plan_pass
from snaketune.stages.plan.training_jobs import start_of, training_job
from snaketune.stages.specs import RefLogpsSpec, RefPassSpec


@cached
def dpo_job(context: Context, name: str) -> Job:
    run = context.config.dpo[name]
    job = training_job(context, "dpo", name, name, run)
    return context.add(replace(job, artifacts=job.artifacts | reference_artifacts(context, run)))


def reference_artifacts(context: Context, run: Dpo) -> dict[str, tuple[Job, ...]]:
    """By role, what a run reads of its reference: the log-probabilities, unless its loss has no reference, and the model itself
    if that is another result."""
    model = reference_weights(context, run).results if isinstance(run.reference, str) else ()
    return {"ref_logps": (_ref_logps_job(context, run),) if run.needs_reference else (), "reference": model}


def _ref_logps_job(context: Context, run: Dpo) -> Job:
    """The job of the log-probabilities of a run's reference, for all runs that share them.

    Log-probabilities with and without the values of single tokens are two results, so that adding a run that needs them doesn't
    change those of other runs. If a config needs both, those without are taken from those with them, which are computed first.
    """
    config, model = context.config, run.reference or run.start
    weights, pack = reference_weights(context, run), pack_of(context, run)
    trusted = allows_code_of(config, model)
    spec = RefLogpsSpec(base=weights.base, trust_remote_code=trusted, token_logps=_needs_tokens(run), **_settings(run))
    of, tokenizer = run.start if isinstance(model, Pretrained) else model, ()
    if isinstance(model, Pretrained):
        tokenizer = (tokenizer_job(context, config.tokenizer_of(run)),)
    # `doctor` also times variants that share it with no run.
    runs = _runs_by_reference(context).get(_key(config, run, spec.token_logps), [run])
    operation = Execution(
        gpus=max(min(dpo.operation.gpus, 1) for dpo in runs),
        allow_cpu=any(dpo.operation.allow_cpu for dpo in runs),
        # A run that doesn't share kernels refuses what another kernel computed.
        share_kernels=all(dpo.reference_pass.share_kernels for dpo in runs),
    )
    detailed: list[Dpo] = [] if spec.token_logps else _runs_by_reference(context).get(_key(config, run, True), [])
    return plan_pass(
        context,
        ("ref_logps", "ref_pass"),
        of.removeprefix("sft:"),
        (spec, RefPassSpec),
        weights,
        pack,
        tokenizer,
        max(dpo.reference_pass.parts for dpo in runs),
        operation,
        after=tuple(_ref_logps_job(context, dpo) for dpo in detailed[:1]),
    )


def reference_weights(context: Context, run: Dpo) -> Weights:
    """The reference of a run: the model that it starts from, unless it names another."""
    return named_weights(context, run.reference) if run.reference else start_of(context, run)


def _settings(run: Dpo) -> dict[str, Any]:
    """The settings of a run that affect the log-probabilities of its reference."""
    # A model that it names has its published weights, whatever the runs train, so that all of them share it.
    named = run.reference is not None
    return {
        "precision": run.training.precision,
        "frozen_weights": named or run.lora is not None,
        "quantization": None if named else run.quantization,
        "apart": not named and run.lora == "continued",
    }


def _needs_tokens(run: Dpo) -> bool:
    return run.reference_pass.token_logps or run.ld_alpha is not None


def _key(config: Workflow, run: Dpo, token_logps: bool) -> Hashable:
    """Equal for runs that share log-probabilities, with or without the values of single tokens."""
    return run.reference or run.start, pack_name(config, run), token_logps, *_settings(run).values()


@cached
def _runs_by_reference(context: Context) -> dict[Hashable, list[Dpo]]:
    """The runs by the reference that they share."""
    shared: dict[Hashable, list[Dpo]] = {}
    for run in context.config.dpo.values():
        if run.needs_reference:
            shared.setdefault(_key(context.config, run, _needs_tokens(run)), []).append(run)
    return shared
