"""All jobs of a config, each with its spec and what it is made from; the `eval` jobs and the report are planned here."""

from snaketune.config.evaluations import TaskSettings
from snaketune.config.operation import Execution
from snaketune.config.references import sft_of
from snaketune.config.task_files import TaskFiles, task_files
from snaketune.config.workflow import Variants, Workflow
from snaketune.stages.job import Job
from snaketune.stages.plan.context import Context, Weights, trusts_remote_code
from snaketune.stages.plan.data_jobs import corpus_job, pack_job, tokenizer_job
from snaketune.stages.plan.dpo_jobs import dpo_job
from snaketune.stages.plan.merge_jobs import merge_job
from snaketune.stages.plan.published_jobs import reported
from snaketune.stages.plan.training_jobs import sft_job, start_of, weights_of
from snaketune.stages.plan.trial_jobs import audit_jobs, diagnosis_job
from snaketune.stages.specs import EvalSpec, ReportSpec, spec_from
from snaketune.stages.table import STAGES


def plan_jobs(config: Workflow, variants: Variants) -> tuple[Job, ...]:
    """Return all jobs of a config, each after those that it is made from; the report is the last. Args: from `config.load`."""
    context = Context(config=config, variants=variants)
    for plan, names in (
        (corpus_job, config.corpora),
        (tokenizer_job, config.tokenizers),
        (sft_job, config.sft),
        (dpo_job, config.dpo),
        (merge_job, config.merge),
        (diagnosis_job, config.diagnose),
    ):
        for name in names:
            plan(context, name)
    audit_jobs(context)
    for name, evaluation in config.eval.items():
        for model in evaluation.every_model(variants):
            _eval_job(context, name, model)
    planned = tuple(context.jobs.values())
    for stage in STAGES.values():
        for job in stage.jobs(config, planned) if stage.jobs else ():
            context.add(job)
    _report_job(context)
    return tuple(context.jobs.values())


def _eval_job(context: Context, evaluation_name: str, model: str) -> Job:
    """Return the job of one model, such as `dpo:demo`, in an entry of `eval:`."""
    config = context.config
    evaluation = config.eval[evaluation_name]
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


def _report_job(context: Context) -> Job:
    """Plan the job of the report, which reads all results that it shows."""
    # Sorted, so that the order of the config doesn't matter.
    stages = list(STAGES)
    chosen = (job for job in context.jobs.values() if STAGES[job.stage].in_report)
    jobs = tuple(sorted(chosen, key=lambda job: (stages.index(job.stage), job.name)))
    grids = {
        (section, variant): f"{section}.{name}"
        for section, names in context.variants.items()
        for name, variants in names.items()
        for variant in variants
        if variant != name
    }
    shown = tuple(reported(job, job.artifacts, grids.get((job.stage, job.name), "")) for job in jobs)
    return context.plan("report", "", spec_from(ReportSpec, context.config.report, jobs=shown), {"results": jobs})
