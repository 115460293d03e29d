"""The jobs that write model cards: one for each trained model, of all results that its card tells of."""

from collections.abc import Iterable, Iterator

from snaketune.config.workflow import Workflow
from snaketune.stages.jobs import Job
from snaketune.stages.specs import CardSpec, CorpusWords, ReportedJob


def cards(jobs: Iterable[Job], config: Workflow) -> Iterator[Job]:
    """Of every SFT and DPO run among the jobs."""
    trained, evaluations = [], {}
    for job in jobs:
        if job.stage in ("sft", "dpo"):
            trained.append(job)
        elif job.stage == "eval":
            evaluations.setdefault(job.name.partition("/")[2], []).append(job)
    for training in trained:
        name = f"{training.stage}-{training.name}"
        yield _card(training, name, evaluations.get(name, []), config)


def _card(training: Job, name: str, evaluations: list[Job], config: Workflow) -> Job:
    trainings = list(_trainings(training))
    # In one order, whatever the order of the config: the card is the same.
    evaluations = sorted(evaluations, key=lambda evaluation: evaluation.name)
    packs = [run.artifacts["pack"][0] for run in trainings]
    # Those that it was measured on too, for where they are from.
    measured = [pack for evaluation in evaluations for pack in evaluation.artifacts["packs"]]
    corpora = {corpus.name: corpus for corpus in map(_corpus_of, [*packs, *measured])}
    told = [
        *((run, {"model": run.artifacts["model"][:1], "pack": run.artifacts["pack"]}) for run in trainings),
        # Two runs may share their rows.
        *((pack, {"corpus": (_corpus_of(pack),)}) for pack in {pack.name: pack for pack in packs}.values()),
        *((evaluation, {}) for evaluation in evaluations),
        *((corpora[corpus], {}) for corpus in sorted(corpora)),
    ]
    spec = CardSpec(
        model=f"{training.stage}:{training.name}",
        license=next(
            (found for run in trainings if run.stage == "sft" and (found := config.sft[run.name].license)), None
        ),
        corpora={
            corpus: CorpusWords(**config.corpora[corpus].model_dump(include=set(CorpusWords.model_fields)))
            for corpus in sorted({_corpus_of(pack).name for pack in packs})
        },
        jobs=tuple(
            ReportedJob(
                stage=job.stage,
                name=job.name,
                made_from={role: tuple(one.key for one in some) for role, some in made_from.items() if some},
            )
            for job, made_from in told
        ),
    )
    return Job(stage="card", name=name, spec=spec, artifacts={"results": tuple(job for job, _ in told)})


def _trainings(training: Job) -> Iterator[Job]:
    """A training and those that it goes on from, the last one first."""
    yield training
    for before in training.artifacts.get("model", ())[:1]:
        yield from _trainings(before)


def _corpus_of(pack: Job) -> Job:
    (plan,) = pack.artifacts["plan"]
    return plan.artifacts["tokens"][0].artifacts["corpus"][0]
