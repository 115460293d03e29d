"""The `eval` jobs."""

from snaketune.config.evaluations import Evaluation, TaskSettings
from snaketune.config.operation import Execution
from snaketune.config.references import sft_of
from snaketune.config.task_files import TaskFiles, task_files
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, Weights, trusts_remote_code
from snaketune.stages.plan.data_jobs import corpus_job, pack_job, tokenizer_job
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.merge_jobs import merge_job
from snaketune.stages.plan.training_jobs import sft_job, start_of, weights_of
from snaketune.stages.specs import EvalSpec, spec_from


def eval_job(context: Context, evaluation_name: str, evaluation: Evaluation, model: str) -> Job:
    """Return the job of one model, such as `dpo:demo`, in an evaluation."""
    config = context.config
    kind, _, name = model.partition(":")
    trained = sft_of(config, kind, name)
    sft = config.sft[trained]
    if kind == "base":
        weights, references = start_of(context, sft), ()
    elif kind == "merge":
        weights, references = Weights(results=(merge_job(context, name),)), ()
    else:
        run = config.dpo[name] if kind == "dpo" else sft
        job = dpo_job(context, name) if kind == "dpo" else sft_job(context, name)
        weights = weights_of(context, run, job)
        # The log-probabilities of unpaired completions don't belong to the pairs that are evaluated.
        references = job.artifacts["ref_logps"] if kind == "dpo" and not run.unpaired else ()
    # None: tasks that lm-evaluation-harness ships.
    folder = evaluation.tasks and evaluation.tasks.folder
    tasks = task_files(folder) if folder else TaskFiles((), ())
    packs = [("sft", corpus) for corpus in evaluation.conversations]
    packs += [("preference", corpus) for corpus in evaluation.preferences]
    return context.plan(
        "eval",
        f"{evaluation_name}/{kind}-{name}",
        spec_from(
            EvalSpec,
            evaluation,
            base=weights.base,
            trust_remote_code=trusts_remote_code(config, trained),
            tasks=spec_from(TaskSettings, evaluation.tasks) if evaluation.tasks else None,
        ),
        weights.artifacts
        | {
            "tokenizer": (tokenizer_job(context, sft.tokenizer),),
            "corpora": tuple(corpus_job(context, corpus) for corpus in evaluation.conversations),
            "packs": tuple(pack_job(context, of, corpus, sft.tokenizer, evaluation.packing) for of, corpus in packs),
            "ref_logps": references,
        },
        files={"base": weights.files, "tasks": tasks.inside, "task_data": tasks.outside},
        operation=Execution(gpus=sft.operation.gpus and 1),
    )
