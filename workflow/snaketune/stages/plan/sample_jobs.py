"""The `sample` jobs, the `prompts` and `generate` jobs before them, and the `score` jobs after them.

    prompts ─┬─ generate 1-of-2 ─┬─ sample ── score ── select (rows of a corpus)
             └─ generate 2-of-2 ─┘        ├─ judge (scores by a model that is asked)
                                          └─ rate (scores by a reward model)

The table reads its parts, but isn't stale where they are missing: like those of a reference, they are how it is made.
"""

from pathlib import Path

from snaketune.config.base_models import Pretrained
from snaketune.config.corpora import Corpus
from snaketune.config.generation import Server
from snaketune.config.operation import Execution
from snaketune.stages.job import Job
from snaketune.stages.plan.data_jobs import (
    Context,
    Weights,
    base_of,
    cached,
    corpus_job,
    tokenizer_job,
    trusts_remote_code,
)
from snaketune.stages.plan.judge_jobs import judge_job
from snaketune.stages.plan.model_jobs import named_model
from snaketune.stages.plan.training_jobs import reward_job
from snaketune.stages.specs import (
    GenerateSpec,
    JudgeSpec,
    PromptsSpec,
    RateSpec,
    ResponsesSpec,
    SampleSpec,
    ScoreSpec,
    SelectSpec,
    spec_from,
)


@cached
def sample_job(context: Context, name: str) -> Job:
    config, sample = context.config, context.config.sample[name]
    trained, weights, references = named_model(context, sample.model)
    tokenizer = (tokenizer_job(context, config.sft[trained].tokenizer),)
    responses = ResponsesSpec(
        base=weights.base,
        trust_remote_code=trusts_remote_code(config, trained),
        # As `evaluation.model_scores` loads it.
        frozen_weights=all(job.spec.frozen_weights for job in references[:1]),
        decoding=sample.generation.decoding,
        responses=sample.responses,
    )
    artifacts = weights.artifacts | {"prompts": (_prompts_job(context, name),), "tokenizer": tokenizer}
    inputs = {"artifacts": artifacts, "files": {"base": weights.files}}
    engine, parts = sample.operation.engine, sample.operation.parts
    size = sample.generation.batch_size
    operation = Execution(
        # A server computes elsewhere.
        gpus=0 if isinstance(engine, Server) else sample.operation.gpus,
        engine=engine,
        vllm=sample.operation.vllm,
    )
    engine_name = f"server: {engine.model}" if isinstance(engine, Server) else engine
    specs = (
        GenerateSpec(**dict(responses), engine=engine_name, batch_size=size, part=part + 1, parts=parts)
        for part in range(parts)
    )
    jobs = tuple(
        context.plan("generate", f"{name}/{spec.part}-of-{parts}", spec, operation=operation, **inputs)
        for spec in specs
    )
    counts_engine = config.reruns_on.get("sample") == "versions"
    spec = SampleSpec(**dict(responses), engine=engine_name if counts_engine else None)
    pattern = jobs[0].manifest.replace(f"/1-of-{parts}/", f"/*-of-{parts}/")
    return context.plan("sample", name, spec, operation=Execution(parts=pattern), after=jobs, **inputs)


def _prompts_job(context: Context, name: str) -> Job:
    config, sample = context.config, context.config.sample[name]
    trained, _, _ = named_model(context, sample.model)
    base = base_of(config, trained)
    spec = spec_from(
        PromptsSpec,
        sample.prompts,
        base=base,
        new_tokens=sample.generation.max_new_tokens,
        template_variables=sample.generation.template_variables,
    )
    description = f"{base.path}/config.json" if isinstance(base, Pretrained) else ""
    return context.plan(
        "prompts",
        name,
        spec,
        {
            "corpora": tuple(corpus_job(context, corpus) for corpus in sample.prompts.corpora),
            "tokenizer": (tokenizer_job(context, config.sft[trained].tokenizer),),
            "scores": tuple(score_job(context, score) for score in sample.prompts.scored),
        },
        files={"base": (description,) if Path(description).is_file() else ()},
    )


@cached
def score_job(context: Context, name: str) -> Job:
    score = context.config.score[name]
    if score.by.judge:
        judge, samples = score.by.judge, sample_job(context, score.samples)
        form = {"scale": judge.scale, "pattern": judge.pattern, "json_reply": judge.json_reply}
        return judge_job(context, "judge", name, judge, JudgeSpec, form, {"samples": (samples,)})
    if reward := score.by.reward:
        base, trained = None, ()
        if reward.path:
            base = Pretrained(path=reward.path, revision=reward.revision, trust_remote_code=reward.trust_remote_code)
        else:
            trained = (reward_job(context, str(reward.model).partition(":")[2]),)
        return context.plan(
            "rate",
            name,
            RateSpec(base=base, batch_size=reward.batch_size),
            {"samples": (sample_job(context, score.samples),), "model": trained},
            files={"base": Weights(base=base).files},
            operation=Execution(gpus=1),
        )
    summands = score.by.sum or {}
    spec = ScoreSpec(
        answer=score.by.answer,
        python=score.by.python is not None,
        seconds=score.by.seconds if score.by.python else 0.0,
        weights=tuple(summands.values()),
    )
    return context.plan(
        "score",
        name,
        spec,
        {
            "samples": (sample_job(context, score.samples),),
            "scores": tuple(score_job(context, summand) for summand in summands),
        },
        files={"python": (score.by.python,) if score.by.python else ()},
    )


def selected_jobs(context: Context, name: str, corpus: Corpus) -> tuple[Job, ...]:
    """The jobs that select rows for a corpus from scored responses, one for each such source, named after it."""
    jobs = []
    for number, source in enumerate(corpus.sources):
        if source.scores:
            score = score_job(context, source.scores)
            spec = spec_from(SelectSpec, source, kind=corpus.kind, rows=source.rows or "best")
            inputs = {"samples": score.artifacts["samples"], "scores": (score,)}
            operation = Execution(sampled=context.config.sample[context.config.score[source.scores].samples].model)
            selected = f"{name}-{number}" if number else name
            jobs.append(context.plan("select", selected, spec, inputs, operation=operation))
    return tuple(jobs)
