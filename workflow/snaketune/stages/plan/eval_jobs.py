"""The `eval` jobs: one for each evaluation and model."""

from snaketune.config.evaluations import TaskSettings
from snaketune.config.operation import Execution
from snaketune.config.task_files import task_files
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, planned
from snaketune.stages.plan.data_jobs import corpus_job, pack_job, tokenizer_job
from snaketune.stages.plan.dpo_jobs import dpo_job, dpo_weights
from snaketune.stages.plan.run_settings import trusts_remote_code
from snaketune.stages.plan.training_jobs import sft_weights, start_of
from snaketune.stages.specs import EvalSpec


@planned
def eval_job(context: Context, evaluation_name: str, model: str) -> Job:
    """Return the job of one model, such as `dpo:demo`, in an entry of `eval:`."""
    config = context.config
    evaluation = config.eval[evaluation_name]
    # None: tasks that lm-evaluation-harness ships.
    folder = evaluation.tasks and evaluation.tasks.folder
    kind, name = model.split(":")
    if kind == "dpo":
        run, weights = config.dpo[name], dpo_weights(context, name)
        trained = run.from_
        # The log-probabilities of unpaired completions don't belong to the pairs that are evaluated.
        references = () if run.unpaired else dpo_job(context, name).artifacts["ref_logps"]
    else:
        trained, references = name, ()
        weights = sft_weights(context, name) if kind == "sft" else start_of(context, config.sft[name])
    sft = config.sft[trained]
    packs = [("sft", corpus) for corpus in evaluation.conversations]
    packs += [("preference", corpus) for corpus in evaluation.preferences]
    return Job(
        stage="eval",
        name=f"{evaluation_name}/{kind}-{name}",
        spec=EvalSpec(
            base=weights.base,
            trust_remote_code=trusts_remote_code(config, trained),
            conversations=evaluation.conversations,
            preferences=evaluation.preferences,
            generation=evaluation.generation,
            exact_match=evaluation.exact_match,
            tasks=TaskSettings(**evaluation.tasks.model_dump(exclude={"folder"})) if evaluation.tasks else None,
            samples=evaluation.samples,
        ),
        artifacts=weights.artifacts
        | {
            "tokenizer": (tokenizer_job(context, sft.tokenizer),),
            "corpora": tuple(corpus_job(context, corpus) for corpus in evaluation.conversations),
            "packs": tuple(pack_job(context, of, corpus, sft.tokenizer, evaluation.packing) for of, corpus in packs),
            "ref_logps": references,
        },
        files={
            "base": weights.files,
            "tasks": task_files(folder).inside if folder else (),
            "task_data": task_files(folder).outside if folder else (),
        },
        operation=Execution(gpus=sft.operation.gpus and 1),
    )
