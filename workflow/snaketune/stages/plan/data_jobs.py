"""The jobs that prepare data: corpora, tokenizers, tokens and packed rows.

Packed rows have no name in the config: they are named after corpus and tokenizer with a digest of the spec, so runs share them.
"""

import math
import os
from pathlib import Path
from typing import Literal

from snaketune.config.model_files import model_files
from snaketune.config.packing import Packing, TrainOn
from snaketune.config.task_files import task_files
from snaketune.config.tokenizers import DEFAULT_CHAT_TEMPLATE
from snaketune.config.training_runs import Dpo, Sft
from snaketune.stages.job import Job, short_digest
from snaketune.stages.plan.context import Context, cached, kind_of
from snaketune.stages.specs import (
    CorpusSpec,
    Kind,
    PackSpec,
    PlanSpec,
    TokenizerSpec,
    TokenizeSpec,
    WriteSpec,
    spec_from,
)

BYTES_PER_PART, MAX_PARTS = 256_000_000, 128


@cached
def corpus_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `corpora:`, after those that it is decontaminated against."""
    corpora, corpus = context.config.corpora, context.config.corpora[name]
    evaluations = context.config.eval.values() if corpus.decontamination else ()
    evaluated = {one for evaluation in evaluations for one in (*evaluation.conversations, *evaluation.preferences)}
    # A corpus that is decontaminated itself is excluded: the two could wait for each other.
    against = sorted(one for one in evaluated if one != name and not corpora[one].decontamination)
    folders = sorted({one.tasks.folder for one in evaluations if one.tasks and one.tasks.folder})
    return context.plan(
        "corpus",
        name,
        spec_from(CorpusSpec, corpus),
        {"against": tuple(corpus_job(context, one) for one in against)},
        files={
            "files": tuple(file for source in corpus.sources for file in source.files),
            "against_files": tuple(file for folder in folders for file in task_files(folder).data),
        },
    )


def part_count(context: Context, corpus: str) -> int:
    """Return the number of parts of a corpus: as many jobs tokenize it, and as many write its rows."""
    if parts := context.config.corpora[corpus].parts:
        return parts
    files = map(Path, corpus_job(context, corpus).files["files"])
    size = sum(file.stat().st_size for file in files if file.is_file())
    return min(max(1, math.ceil(size / BYTES_PER_PART)), MAX_PARTS)


@cached
def tokenizer_job(context: Context, name: str) -> Job:
    """Return the job of an entry of `tokenizers:`."""
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
    """Return the jobs of all parts of a corpus; rows of any length are packed from them."""
    # Only conversations have turns to choose from: pairs are supervised in their completions, documents as a whole.
    if context.config.corpora[corpus].kind == "text":
        kind, train_on = "text", "all"
    elif kind != "sft":
        train_on = "assistant"
    reasoning = context.config.corpora[corpus].reasoning
    if kind == "sft" and train_on != "all":
        reasoning = reasoning or "exact"
    whole = TokenizeSpec(kind=kind, train_on=train_on, reasoning=reasoning, part=0, parts=0)
    name = f"{corpus}-{tokenizer}-{short_digest(whole, corpus, tokenizer)}"
    parts = part_count(context, corpus)
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
    """Return the job that joins the packed rows of a corpus, after those that plan and write them."""
    packing = packing.model_copy(update={"overflow": packing.overflow_of(context.config.corpora[corpus].kind)})
    spec = PackSpec(kind=kind, **packing.model_dump())
    name = f"{corpus}-{tokenizer}-{packing.longest}-{short_digest(spec, corpus, tokenizer)}"
    tokens = tokenize_jobs(context, kind, corpus, tokenizer, packing.train_on)
    ordered = {"corpus": (corpus_job(context, corpus),)} if packing.order == "column" else {}
    plan = context.plan("plan", name, spec_from(PlanSpec, packing, kind=kind), {"tokens": tokens} | ordered)
    # Rows that aren't packed are read as text from the corpus.
    raw = (corpus_job(context, corpus),) if packing.strategy == "none" else ()
    specs = (WriteSpec(part=part + 1, parts=len(tokens)) for part in range(len(tokens)))
    shards = tuple(
        context.plan(
            "write", f"{name}/{one.part}-of-{one.parts}", one, {"plan": (plan,), "tokens": tokens, "corpus": raw}
        )
        for one in specs
    )
    return context.plan("pack", name, spec, {"plan": (plan,), "shards": shards})


def pack_of(context: Context, run: Sft | Dpo) -> Job:
    """Return the job of the packed rows that a run trains on."""
    return pack_job(context, kind_of(run), run.corpus, context.config.tokenizer_of(run), run.packing)


def corpus_of(pack: Job) -> Job:
    """Return the job of the corpus whose rows a pack holds."""
    (plan,) = pack.artifacts["plan"]
    return plan.artifacts["tokens"][0].artifacts["corpus"][0]
