"""The jobs that use trained models: `merge`, `eval`, and `race`, which compares evaluations of the variants of a grid.

    V@0.1 ─ eval ┐                    V@0.3 ─ eval ┐
    W@0.1 ─ eval ┴ race@0.1 ┬──────── W@0.3 ─ eval ┴ race@0.3 ┬─ V
                            └ V@0.3, W@0.3                    └─ W

A training waits for the race before it, which may pause it (`stages.races`).
"""

from typing import Any

from snaketune.config.evaluations import Evaluation, ExactMatch, TaskSettings
from snaketune.config.generation import Generation
from snaketune.config.held_out import snapshot_name
from snaketune.config.named_entries import sft_of
from snaketune.config.operation import Execution
from snaketune.config.task_files import TaskFiles, task_files
from snaketune.config.training_runs import Dpo
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import (
    Context,
    Weights,
    cached,
    corpus_job,
    pack_job,
    pack_of,
    tokenizer_job,
    trusts_remote_code,
)
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.teacher_jobs import teacher_job
from snaketune.stages.plan.training_jobs import reward_job, sft_job, start_of, weights_of
from snaketune.stages.specs import EvalSpec, Kind, MergedModel, MergeSpec, RaceSpec, spec_from


@cached
def merge_job(context: Context, name: str) -> Job:
    config, merge = context.config, context.config.merge[name]
    models: list[MergedModel] = []
    results: list[Job] = []
    files: list[str] = []
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


def named_model(context: Context, model: str) -> tuple[str, Weights, tuple[Job, ...]]:
    """What `base:NAME`, `sft:NAME`, `dpo:NAME`, `merge:NAME` or `reward:NAME` is: the SFT run that it is or starts from, its
    weights, and the reference log-probabilities of its training."""
    config = context.config
    kind, _, name = model.partition(":")
    trained = sft_of(config, kind, name)
    if kind == "base":
        return trained, start_of(context, config.sft[trained]), ()
    if kind == "merge":
        return trained, Weights(results=(merge_job(context, name),)), ()
    if kind == "reward":
        return trained, Weights(results=(reward_job(context, name),)), ()
    run = config.dpo[name] if kind == "dpo" else config.sft[trained]
    job = dpo_job(context, name) if kind == "dpo" else sft_job(context, name)
    # The log-probabilities of unpaired completions don't belong to the pairs that are evaluated.
    references = job.artifacts["ref_logps"] if isinstance(run, Dpo) and not run.unpaired else ()
    return trained, weights_of(context, run, job), references


def eval_name(evaluation_name: str, model: str) -> str:
    """The name of the job of one model, such as `dpo:demo`."""
    return f"{evaluation_name}/{model.replace(':', '-')}"


def eval_job(context: Context, evaluation_name: str, evaluation: Evaluation, model: str) -> Job:
    """The job of one model, such as `dpo:demo`, in an evaluation."""
    config = context.config
    trained, weights, references = named_model(context, model)
    sft, rewards = config.sft[trained], model.startswith("reward:")
    if rewards:
        # It writes no text.
        text = {"conversations": (), "tasks": None, "judge": None, "kl_from": None, "teacher_of": None}
        evaluation = evaluation.model_copy(update=text)
    # None: tasks that lm-evaluation-harness ships.
    folder = evaluation.tasks.folder if evaluation.tasks else None
    tasks = task_files(folder) if folder else TaskFiles((), ())
    kl_from = evaluation.kl_from if evaluation.kl_from != model else None
    start = named_model(context, kl_from)[1] if kl_from else Weights()
    taught = config.sft[evaluation.teacher_of] if evaluation.teacher_of else None
    packs: list[tuple[Kind, str]] = [
        *(("sft", corpus) for corpus in evaluation.conversations),
        *(("preference", corpus) for corpus in evaluation.preferences),
    ]
    return context.plan(
        "eval",
        eval_name(evaluation_name, model),
        spec_from(
            EvalSpec,
            evaluation,
            base=weights.base,
            trust_remote_code=trusts_remote_code(config, trained),
            tasks=spec_from(TaskSettings, evaluation.tasks) if evaluation.tasks else None,
            judged=evaluation.judge.prompts if evaluation.judge else 0,
            kl=kl_from is not None,
            kl_base=start.base,
            teacher_temperature=taught.distill.temperature if taught and taught.distill else None,
            rewards=rewards,
        ),
        weights.artifacts
        | {
            "tokenizer": (tokenizer_job(context, sft.tokenizer),),
            "corpora": tuple(corpus_job(context, corpus) for corpus in evaluation.conversations),
            "packs": tuple(pack_job(context, of, corpus, sft.tokenizer, evaluation.packing) for of, corpus in packs),
            "ref_logps": references,
            "kl_from": start.results,
            "teacher": (teacher_job(context, taught),) if taught else (),
            "taught_pack": (pack_of(context, taught),) if taught else (),
        },
        files={"base": weights.files, "kl_base": start.files, "tasks": tasks.inside, "task_data": tasks.outside},
        operation=spec_from(Execution, evaluation.operation, gpus=sft.operation.gpus and 1),
    )


def race_before(context: Context, stage: str, name: str) -> Job | None:
    """The last race that may pause a run before its end; None if there is none."""
    runs, variant = getattr(context.config, stage), name.partition("@")[0]
    if variant not in runs or not (race := runs[variant].race):
        return None
    passed = [rung for rung in race.rungs if rung < (runs[name].training.until or 1.0)]
    grid = next(grid for grid, variants in context.variants[stage].items() if variant in variants)
    return _race_job(context, stage, grid, passed[-1]) if passed else None


@cached
def _race_job(context: Context, stage: str, grid: str, rung: float) -> Job:
    variants = context.variants[stage][grid]
    run = getattr(context.config, stage)[variants[0]]
    race, name = run.race, f"{stage}-{grid}"
    models = [f"{stage}:{snapshot_name(variant, rung)}" for variant in variants]
    rows: dict[str, Any] = {"conversations" if stage == "sft" else "preferences": (run.corpus,)}
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
    earlier = [share for share in race.rungs if share < rung][-1:]
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
            "before": tuple(_race_job(context, stage, grid, share) for share in earlier),
        },
    )
