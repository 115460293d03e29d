"""The context of one plan, and the jobs that prepare data: corpora, tokenizers, tokens and packed rows.

The context holds the config, the jobs planned so far, and what a run inherits from the SFT runs below it. Packed rows have no
name in the config: they are named after corpus and tokenizer with a digest of the spec, so runs share them.
"""

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from snaketune.config.base import Model
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Lora
from snaketune.config.model_files import model_files
from snaketune.config.named_entries import first_run
from snaketune.config.packing import Packing, TrainOn
from snaketune.config.reward_runs import Reward, Run
from snaketune.config.task_files import task_files
from snaketune.config.tokenizers import DEFAULT_CHAT_TEMPLATE
from snaketune.config.training_runs import Sft
from snaketune.config.workflow import Variants, Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.corpus_parts import CorpusPart, cut, part_count
from snaketune.stages.specs import (
    CorpusSpec,
    DecideSpec,
    FilterSpec,
    Kind,
    PackSpec,
    PlanSpec,
    ReadSpec,
    TokenizerSpec,
    TokenizeSpec,
    WriteSpec,
    spec_from,
)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The shared argument of all functions of the planner. Those that several runs call are `cached`."""

    config: Workflow
    variants: Variants
    # The jobs planned so far, by stage and name, each after those whose results it reads.
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    # What `cached` functions returned.
    cache: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def add(self, job: Job) -> Job:
        """Add a job and return it, or return the equal job planned before; SnaketuneError if a different one has its name."""
        known = self.jobs.setdefault((job.stage, job.name), job)
        if known != job:
            raise SnaketuneError(
                f"two different {job.stage} jobs would be called {job.name!r}; rename one of the entries of the config that "
                "the name is made of"
            )
        return known

    def plan(self, stage: str, name: str, spec: Model, artifacts: dict[str, tuple[Job, ...]], **more: Any) -> Job:
        """Add the job that a stage's name, spec and inputs make. Args: more: other attributes of `Job`."""
        return self.add(Job(stage=stage, name=name, spec=spec, artifacts=artifacts, **more))


def cached(function: Function) -> Function:
    """A function that is computed once per context and (hashable) arguments, as for a corpus that many runs share."""

    @wraps(function)
    def lookup(context: Context, *arguments: Hashable) -> Any:
        key = (function, *arguments)
        if key not in context.cache:
            context.cache[key] = function(context, *arguments)
        return context.cache[key]

    return cast(Function, lookup)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parts of a model, which `models.adapter_stack` assembles: results of jobs, and the base model below them."""

    # All but the last hold adapters only, each for the model that the following ones make.
    results: tuple[Job, ...] = ()
    # The base model, where the last result holds an adapter only, or there are no results.
    base: Pretrained | Scratch | None = None

    @property
    def artifacts(self) -> dict[str, tuple[Job, ...]]:
        return {"model": self.results[:1], "base_layers": self.results[1:]}

    @property
    def files(self) -> tuple[str, ...]:
        return model_files(self.base.path) if isinstance(self.base, Pretrained) else ()

    def with_adapter(self, job: Job) -> "Weights":
        """These weights with the adapter that a job trained for them."""
        return Weights(results=(job, *self.results), base=self.base)


def sft_below(config: Workflow, name: str, run: Run) -> str:
    """The SFT run that a run of this name is, or starts from."""
    return name if isinstance(run, Sft) else config.sft_below(run)


def base_of(config: Workflow, sft: str) -> Pretrained | Scratch:
    base = config.sft[first_run(config, sft)].base
    assert base is not None, "the config was checked: a run that continues no other has a base"
    return base


def trusts_remote_code(config: Workflow, sft: str) -> bool:
    """Whether the config allows running the code that comes with the base model below an SFT run."""
    return getattr(base_of(config, sft), "trust_remote_code", False)


def lora_of(config: Workflow, run: Run) -> Lora | None:
    lora = config.lora_of(run)
    # A continued adapter is part of the reference too, which has no dropout.
    return lora.model_copy(update={"dropout": 0.0}) if lora and run.lora == "continued" else lora


def kind_of(run: Run) -> Kind:
    if isinstance(run, Sft):
        return "sft"
    return "preference" if isinstance(run, Reward) or not run.unpaired else "unpaired"


@cached
def corpus_job(context: Context, name: str) -> Job:
    """The job of an entry of `corpora:`, after those that it is decontaminated against."""
    # Scored responses are of models, which are trained on corpora.
    from snaketune.stages.plan.sample_jobs import selected_jobs

    corpora, corpus = context.config.corpora, context.config.corpora[name]
    evaluations = context.config.eval.values() if corpus.decontamination else ()
    evaluated = {entry for evaluation in evaluations for entry in (*evaluation.conversations, *evaluation.preferences)}
    # Excluded are corpora that are decontaminated themselves, and those made of responses of models, which may be trained on
    # this corpus: the two could wait for each other.
    against = sorted(
        entry
        for entry in evaluated
        if entry != name and not corpora[entry].decontamination and not corpora[entry].sampled
    )
    folders = sorted(
        {evaluation.tasks.folder for evaluation in evaluations if evaluation.tasks and evaluation.tasks.folder}
    )
    artifacts = {
        "against": tuple(corpus_job(context, entry) for entry in against),
        "selected": selected_jobs(context, name, corpus),
    }
    against_files = tuple(file for folder in folders for file in task_files(folder).data)
    spec, parts = spec_from(CorpusSpec, corpus), cut(corpus)
    if len(parts) > 1:
        return _corpus_of_parts(context, name, spec, parts, artifacts, against_files)
    files = tuple(file for source in corpus.sources for file in source.files)
    return context.plan("corpus", name, spec, artifacts, files={"files": files, "against_files": against_files})


def _corpus_of_parts(
    context: Context,
    name: str,
    spec: CorpusSpec,
    parts: list[CorpusPart],
    artifacts: dict[str, tuple[Job, ...]],
    against_files: tuple[str, ...],
) -> Job:
    """The job of a corpus that is read in parts. Args: artifacts: what those read that read the sources."""
    # In the order of the sources that have scored responses.
    scored = [number for number, source in enumerate(spec.sources) if source.scores]
    selected = dict(zip(scored, artifacts["selected"], strict=True))
    count = len(parts)
    read = tuple(
        context.plan(
            "read",
            f"{name}/{number}-of-{count}",
            ReadSpec(**spec.reading(part.sources), ranges=part.ranges),
            artifacts | {"selected": tuple(selected[source] for source in part.numbers if source in selected)},
            files={
                "files": tuple(file for source in part.sources for file in source.files),
                "against_files": against_files,
            },
        )
        for number, part in enumerate(parts, start=1)
    )
    numbers = tuple(part.numbers for part in parts)
    decided = context.plan(
        "decide", name, DecideSpec.model_construct(**dict(spec), sources_of_parts=numbers), {"read": read}
    )
    filtered = tuple(
        context.plan(
            "filter",
            f"{name}/{number}-of-{count}",
            FilterSpec(part=number, parts=count),
            {"decided": (decided,), "read": read},
        )
        for number in range(1, count + 1)
    )
    made = {"decided": (decided,), "filtered": filtered}
    return context.plan("corpus", name, spec, made, files={"files": (), "against_files": ()})


@cached
def tokenizer_job(context: Context, name: str) -> Job:
    tokenizer = context.config.tokenizers[name]
    training = tokenizer.train
    # A relative path, so that a moved repository has the same input files.
    template = tokenizer.chat_template or (training and os.path.relpath(DEFAULT_CHAT_TEMPLATE))
    return context.plan(
        "tokenizer",
        name,
        spec_from(TokenizerSpec, training, tokenizer),
        {"corpora": tuple(corpus_job(context, corpus) for corpus in training.corpora) if training else ()},
        files={"chat_template": (template,) if template else (), "base": model_files(tokenizer.adopt)},
    )


@cached
def tokenize_jobs(
    context: Context, kind: Kind | Literal["text"], corpus: str, tokenizer: str, train_on: TrainOn
) -> tuple[Job, ...]:
    """The jobs of all parts of a corpus; rows of any length are packed from them."""
    # Only conversations have turns to choose from: pairs are supervised in their completions, documents as a whole.
    if context.config.corpora[corpus].kind == "text":
        kind, train_on = "text", "all"
    elif kind != "sft":
        train_on = "assistant"
    reasoning, empty_reasoning = (
        context.config.corpora[corpus].reasoning,
        context.config.corpora[corpus].empty_reasoning,
    )
    if kind == "sft" and train_on != "all":
        reasoning = reasoning or "exact"
    whole = TokenizeSpec(
        kind=kind, train_on=train_on, reasoning=reasoning, empty_reasoning=empty_reasoning, part=0, parts=0
    )
    name = f"{corpus}-{tokenizer}-{short_digest(whole, corpus, tokenizer)}"
    parts = part_count(context.config.corpora[corpus])
    quarantines = context.config.tokenizers[tokenizer].on_template_error == "quarantine"
    most_refused = context.config.corpora[corpus].max_quarantined_fraction if quarantines else None
    artifacts: dict[str, tuple[Job, ...]] = {
        "corpus": (corpus_job(context, corpus),),
        "tokenizer": (tokenizer_job(context, tokenizer),),
    }
    specs = (
        whole.model_copy(update={"part": part + 1, "parts": parts, "most_refused": most_refused})
        for part in range(parts)
    )
    return tuple(context.plan("tokenize", f"{name}/{spec.part}-of-{parts}", spec, artifacts) for spec in specs)


@cached
def pack_job(context: Context, kind: Kind, corpus: str, tokenizer: str, packing: Packing) -> Job:
    """The job that joins the packed rows of a corpus, after those that plan and write them."""
    spec, name = _pack_spec(context.config, kind, corpus, tokenizer, packing)
    packing = packing.model_copy(update={"overflow": spec.overflow})
    tokens = tokenize_jobs(context, kind, corpus, tokenizer, packing.train_on)
    ordered = {"corpus": (corpus_job(context, corpus),)} if packing.order == "column" else {}
    plan = context.plan("plan", name, spec_from(PlanSpec, packing, kind=kind), {"tokens": tokens} | ordered)
    # Rows that aren't packed are read as text from the corpus.
    raw = (corpus_job(context, corpus),) if packing.strategy == "none" else ()
    specs = (WriteSpec(part=part + 1, parts=len(tokens)) for part in range(len(tokens)))
    shards = tuple(
        context.plan(
            "write", f"{name}/{shard.part}-of-{shard.parts}", shard, {"plan": (plan,), "tokens": tokens, "corpus": raw}
        )
        for shard in specs
    )
    return context.plan("pack", name, spec, {"plan": (plan,), "shards": shards})


def _pack_spec(config: Workflow, kind: Kind, corpus: str, tokenizer: str, packing: Packing) -> tuple[PackSpec, str]:
    """The spec and the name of packed rows."""
    packing = packing.model_copy(update={"overflow": packing.overflow_of(config.corpora[corpus].kind)})
    spec = PackSpec(kind=kind, **packing.model_dump())
    return spec, f"{corpus}-{tokenizer}-{packing.longest}-{short_digest(spec, corpus, tokenizer)}"


def pack_name(config: Workflow, run: Run) -> str:
    """The name of a run's packed rows, without planning them: they may be of responses of a model that is planned just now."""
    return _pack_spec(config, kind_of(run), run.corpus, config.tokenizer_of(run), run.packing)[1]


def pack_of(context: Context, run: Run) -> Job:
    return pack_job(context, kind_of(run), run.corpus, context.config.tokenizer_of(run), run.packing)


def corpus_of(pack: Job) -> Job:
    (plan,) = pack.artifacts["plan"]
    return plan.artifacts["tokens"][0].artifacts["corpus"][0]
