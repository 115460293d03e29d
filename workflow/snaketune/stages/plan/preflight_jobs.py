"""The `preflight` jobs: one per chain of runs (SFT runs that continue each other, and the DPO runs based on them)."""

from collections.abc import Iterable

from snaketune.config.evaluations import Evaluation
from snaketune.config.operation import Execution
from snaketune.config.training_runs import Dpo, Learning, Sft
from snaketune.config.workflow import Workflow
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, planned
from snaketune.stages.plan.data_jobs import corpus_job, corpus_of, pack_of, tokenizer_job
from snaketune.stages.plan.run_settings import base_of, evaluated_models, first_run, kind_of, lora_of
from snaketune.stages.plan.weights import Weights
from snaketune.stages.specs import PreflightEvaluation, PreflightRun, PreflightSpec, SftSpec, canonical

# The keys of `training` that a finding can depend on; runs that differ only in others are checked once.
CHECKED_LEARNING = {"epochs", "batch_rows", "learning_rate", "optimizer", "precision", "save_dtype"}


@planned
def preflight_job(context: Context, family: str) -> Job:
    """Return the job that checks the family of an SFT run: that run, those that continue it, and the DPO runs from them."""
    config = context.config
    sft = {name: run for name, run in config.sft.items() if first_run(config, name) == family}
    dpo = {name: run for name, run in config.dpo.items() if run.from_ in sft}
    runs = {f"sft.{name}": run for name, run in sft.items()} | {f"dpo.{name}": run for name, run in dpo.items()}
    packs_of_runs = {key: pack_of(context, run) for key, run in runs.items()}
    # Sorted, so that the order of the config doesn't matter.
    packs = tuple({packs_of_runs[key].manifest: packs_of_runs[key] for key in sorted(runs)}.values())
    checked: dict[str, PreflightRun] = {}
    for key in sorted(runs):
        spec = _run_spec(config, key, runs[key], packs.index(packs_of_runs[key]))
        checked.setdefault(canonical(spec.model_copy(update={"key": ""})), spec)
    models = {f"{kind}:{name}" for kind, names in (("base", sft), ("sft", sft), ("dpo", dpo)) for name in names}
    evaluations = tuple(
        _evaluation_spec(config, name, evaluation, evaluated)
        for name, evaluation in sorted(config.eval.items())
        if (evaluated := models.intersection(evaluated_models(evaluation, context.variants)))
    )
    evaluated_corpora = sorted({corpus for evaluation in evaluations for corpus in evaluation.corpora})
    base = base_of(config, family)
    return Job(
        stage="preflight",
        name=family,
        spec=PreflightSpec(base=base, runs=tuple(checked.values()), evaluations=evaluations),
        artifacts={
            "tokenizer": (tokenizer_job(context, sft[family].tokenizer),),
            "packs": packs,
            "corpora": tuple(map(corpus_of, packs)),
            "evaluated": tuple(corpus_job(context, corpus) for corpus in evaluated_corpora),
        },
        files={"base": Weights(base=base).files},
        operation=Execution(gpus=max(min(run.operation.gpus, 1) for run in runs.values())),
    )


def _run_spec(config: Workflow, key: str, run: Sft | Dpo, pack: int) -> PreflightRun:
    """Return the settings of a run that preflight checks. Args: key: of the config; pack: its index in the job's packs."""
    learning = Learning(**run.training.model_dump(include=CHECKED_LEARNING), schedule="constant")
    return PreflightRun(
        key=key,
        kind=kind_of(run),
        run=SftSpec(base=None, training=learning, lora=lora_of(config, run), quantization=run.quantization),
        reference=run.reference if isinstance(run, Dpo) else None,
        pack=pack,
        micro_batch_rows=1 if run.training.micro_batch_rows == "auto" else run.training.micro_batch_rows,
        gradient_checkpointing=run.training.gradient_checkpointing,
        **run.operation.model_dump(include={"gpus", "nodes", "launch", "zero_stage", "allow_cpu"}),
    )


def _evaluation_spec(config: Workflow, name: str, evaluation: Evaluation, models: Iterable[str]) -> PreflightEvaluation:
    """Return what of an evaluation of these models can be checked before training."""
    return PreflightEvaluation(
        key=f"eval.{name}",
        corpora=(*evaluation.conversations, *evaluation.preferences),
        trained_on=tuple(sorted(set().union(*(_trained_on(config, model) for model in models)))),
        # Documents have no questions.
        exact_match=tuple(
            corpus
            for corpus in evaluation.conversations
            if "exact_match" in evaluation.model_fields_set and config.corpora[corpus].kind != "text"
        ),
    )


def _trained_on(config: Workflow, model: str) -> set[str]:
    """Return the corpora that a model, such as `dpo:demo`, was trained on, including all trainings that it continues."""
    kind, name = model.split(":")
    if kind == "dpo":
        run = config.dpo[name]
        return {run.corpus} | _trained_on(config, f"sft:{run.from_}")
    own = config.sft[name]
    previous = _trained_on(config, f"sft:{own.continues}") if own.continues else set()
    return previous | ({own.corpus} if kind == "sft" else set())
