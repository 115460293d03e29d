"""What a config asks for: every job, with its spec and what it is made from.

Jobs that nobody named themselves (packed rows, reference log-probs) are named after what they are made of and a digest of
their spec, so runs that agree on them share them.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from snaketune.config.evaluation import Evaluation, TaskQuestions
from snaketune.config.operation import Execution
from snaketune.config.packing import Packing
from snaketune.config.publishing import Gguf
from snaketune.config.runs import Dpo, Sft
from snaketune.config.task_files import task_files
from snaketune.config.tokenizers import DEFAULT_CHAT_TEMPLATE, Tokenizer
from snaketune.config.workflow import Workflow
from snaketune.errors import SnaketuneError
from snaketune.stages.carded import cards
from snaketune.stages.jobs import Job, short_digest
from snaketune.stages.looked_at import LookedAt, expanded
from snaketune.stages.portioned import (
    execution_of,
    kind_of_pairs,
    learning_of,
    waits_for,
)
from snaketune.stages.specs import (
    ConvertSpec,
    CorpusSpec,
    DpoSpec,
    EvalSpec,
    PackSpec,
    PlanSpec,
    ReportedJob,
    ReportSpec,
    SftSpec,
    TokenizerSpec,
    TokenizeSpec,
    WriteSpec,
)
from snaketune.stages.starts import kept
from snaketune.stages.table import STAGES
from snaketune.stages.weights import local_files

# What was found or measured before a training stands in that one's run.json, and a part's pairs in the whole.
NOT_SHOWN = ("preflight", "calibrate", "ref_pass", "trial", "diagnosis", "audit", "card", "convert")
BYTES_PER_PART, MOST_PARTS = 256_000_000, 128


def jobs_asked_for(config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]) -> Iterable[Job]:
    """All jobs; what one is made from stands before it, and the report is the last.

    Args:
        config, variants: from `config.load`.
    """
    return _Asked(config, variants).jobs.values()


class _Asked(LookedAt):
    """The jobs as they are found, by stage and name."""

    def __init__(self, config: Workflow, variants: dict[str, dict[str, tuple[str, ...]]]):
        self.config, self.variants = config, variants
        self.jobs: dict[tuple[str, str], Job] = {}
        self._kept = {}
        # By section and name: its rows, and what measures trainings like it.
        self._trainings: dict[tuple[str, str], tuple[Sft | Dpo, Job, Job]] = {}
        for name in config.corpora:
            self._corpus(name)
        for name in config.tokenizers:
            self._tokenizer(name)
        for name in config.sft:
            self._sft(name)
        for name in config.dpo:
            self._dpo(name)
        for name, diagnosis in config.diagnose.items():
            self._diagnosis(name, diagnosis)
        self._audits()
        for name, evaluation in config.eval.items():
            for model in expanded(evaluation, variants):
                self._eval(name, model)
        for card in cards(self.jobs.values(), config):
            self._add(card)
        for name, gguf in config.gguf.items():
            self._convert(name, gguf)
        self._report(variants)

    def _add(self, job: Job) -> Job:
        known = self.jobs.setdefault((job.stage, job.name), job)
        if known != job:
            raise SnaketuneError(
                f"two different {job.stage} jobs would be called {job.name!r}; rename what they are made of"
            )
        return known

    @kept
    def _corpus(self, name: str) -> Job:
        corpus = self.config.corpora[name]
        files = tuple(file for source in corpus.sources for file in source.files)
        evaluations = self.config.eval.values() if corpus.decontamination else ()
        # A corpus that is itself cleaned of the others can't be waited for.
        against = {
            evaluated: None
            for evaluation in evaluations
            for evaluated in (*evaluation.conversations, *evaluation.preferences)
            if evaluated != name and not self.config.corpora[evaluated].decontamination
        }
        tasks = {folder for evaluation in evaluations if (folder := _task_folder(evaluation))}
        return self._add(
            Job(
                stage="corpus",
                name=name,
                spec=CorpusSpec(**corpus.model_dump(include=set(CorpusSpec.model_fields))),
                artifacts={"against": tuple(self._corpus(evaluated) for evaluated in sorted(against))},
                files={
                    "files": files,
                    "against_files": tuple(file for folder in sorted(tasks) for file in task_files(folder).data),
                },
            )
        )

    @kept
    def _parts(self, corpus: str) -> int:
        """How many jobs share a corpus."""
        job = self._corpus(corpus)
        size = sum(Path(file).stat().st_size for file in job.files["files"] if Path(file).is_file())
        return self.config.corpora[corpus].parts or min(max(1, math.ceil(size / BYTES_PER_PART)), MOST_PARTS)

    @kept
    def _tokenizer(self, name: str) -> Job:
        tokenizer = self.config.tokenizers[name]
        training = tokenizer.train
        spec = TokenizerSpec(
            **(training.model_dump(exclude={"corpora"}) if training else {}),
            adopt=tokenizer.adopt,
            revision=tokenizer.revision,
        )
        return self._add(
            Job(
                stage="tokenizer",
                name=name,
                spec=spec,
                artifacts={"corpora": tuple(self._corpus(corpus) for corpus in training.corpora) if training else ()},
                files={"chat_template": self._chat_template(tokenizer), "base": local_files(tokenizer.adopt)},
            )
        )

    def _chat_template(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        if tokenizer.chat_template:
            return (tokenizer.chat_template,)
        # Relative, so that a moved repository has the same input files as before.
        return (os.path.relpath(DEFAULT_CHAT_TEMPLATE),) if tokenizer.train else ()

    @kept
    def _tokens(self, kind: str, corpus: str, tokenizer: str, train_on: str) -> tuple[Job, ...]:
        """The parts of a tokenized corpus; rows of any length are made of the same ones."""
        # Pairs are supervised from their completions and documents as a whole, whatever is asked of conversations beside them.
        if self.config.corpora[corpus].kind == "text":
            kind, train_on = "text", "all"
        elif kind != "sft":
            train_on = "assistant"
        whole = TokenizeSpec(kind=kind, train_on=train_on, part=0, parts=0)
        name = f"{corpus}-{tokenizer}-{short_digest(whole, corpus, tokenizer)}"
        parts = self._parts(corpus)
        quarantines = self.config.tokenizers[tokenizer].on_template_error == "quarantine"
        most_refused = self.config.corpora[corpus].max_quarantined_fraction if quarantines else None
        return tuple(
            self._add(
                Job(
                    stage="tokenize",
                    name=f"{name}/{part}-of-{parts}",
                    spec=whole.model_copy(update={"part": part, "parts": parts, "most_refused": most_refused}),
                    artifacts={"corpus": (self._corpus(corpus),), "tokenizer": (self._tokenizer(tokenizer),)},
                )
            )
            for part in range(1, parts + 1)
        )

    @kept
    def _pack(self, kind: str, corpus: str, tokenizer: str, packing: Packing) -> Job:
        packing = packing.model_copy(update={"overflow": packing.overflow_of(self.config.corpora[corpus].kind)})
        spec = PackSpec(kind=kind, **packing.model_dump())
        name = f"{corpus}-{tokenizer}-{packing.longest}-{short_digest(spec, corpus, tokenizer)}"
        tokens = self._tokens(kind, corpus, tokenizer, packing.train_on)
        rows = self._add(
            Job(
                stage="plan",
                name=name,
                spec=PlanSpec(kind=kind, lengths=packing.lengths, strategy=packing.strategy, overflow=packing.overflow),
                artifacts={"tokens": tokens},
            )
        )
        shards = tuple(
            self._add(
                Job(
                    stage="write",
                    name=f"{name}/{part}-of-{len(tokens)}",
                    spec=WriteSpec(part=part, parts=len(tokens)),
                    artifacts={
                        "plan": (rows,),
                        "tokens": tokens,
                        # Raw rows are the corpus' own.
                        "corpus": (self._corpus(corpus),) if packing.strategy == "none" else (),
                    },
                )
            )
            for part in range(1, len(tokens) + 1)
        )
        return self._add(Job(stage="pack", name=name, spec=spec, artifacts={"plan": (rows,), "shards": shards}))

    @kept
    def _sft(self, name: str) -> Job:
        run = self.config.sft[name]
        start, pack = self._start_of(run), self._sft_pack(run)
        spec = self._sft_spec(name, run)
        looked_at, calibrated = self._preflight(self._family(name)), self._calibrate(run, spec, name, pack)
        self._trainings["sft", name] = run, pack, calibrated
        return self._add(
            Job(
                stage="sft",
                name=name,
                spec=spec,
                artifacts=start.artifacts | {"pack": (pack,), "tokenizer": (self._tokenizer(run.tokenizer),)},
                files={"base": start.files},
                operation=execution_of(run, looked_at, calibrated),
                after=waits_for(run, looked_at, calibrated),
            )
        )

    def _sft_spec(self, name: str, run: Sft) -> SftSpec:
        """Args: run: of that name, or a variant of it."""
        return SftSpec(
            base=self._start_of(run).base,
            training=learning_of(run),
            lora=run.lora,
            quantization=run.quantization,
            trust_remote_code=self._trusted(name),
        )

    def _dpo_spec(self, run: Dpo) -> DpoSpec:
        return DpoSpec(
            **run.model_dump(include=set(DpoSpec.model_fields) - {"training", "lora"}),
            training=learning_of(run),
            lora=self._lora_of(run),
            continued=run.lora == "continued",
            base=self._start_of_dpo(run).base,
            trust_remote_code=self._trusted(run.from_),
        )

    def _sft_pack(self, run: Sft) -> Job:
        return self._pack("sft", run.corpus, run.tokenizer, run.packing)

    def _preference_pack(self, run: Dpo) -> Job:
        return self._pack(kind_of_pairs(run), run.corpus, self.config.sft[run.from_].tokenizer, run.packing)

    @kept
    def _dpo(self, name: str) -> Job:
        run = self.config.dpo[name]
        model, pack = self._start_of_dpo(run), self._preference_pack(run)
        spec = self._dpo_spec(run)
        looked_at, calibrated = self._preflight(self._family(run.from_)), self._calibrate(run, spec, run.from_, pack)
        self._trainings["dpo", name] = run, pack, calibrated
        return self._add(
            Job(
                stage="dpo",
                name=name,
                spec=spec,
                artifacts=model.artifacts | {"pack": (pack,), "ref_logps": self._references(run)},
                files={"base": model.files},
                operation=execution_of(run, looked_at, calibrated),
                after=waits_for(run, looked_at, calibrated),
            )
        )

    def _eval(self, evaluation_name: str, model: str) -> Job:
        evaluation = self.config.eval[evaluation_name]
        folder = _task_folder(evaluation)
        kind, name = model.split(":")
        trained = self.config.dpo[name].from_ if kind == "dpo" else name
        sft, weights = self.config.sft[trained], self._weights(kind, name)
        # Those of single completions are of none of the pairs that an evaluation asks about.
        paired = kind == "dpo" and not self.config.dpo[name].unpaired
        references = self._references(self.config.dpo[name]) if paired else ()
        return self._add(
            Job(
                stage="eval",
                name=f"{evaluation_name}/{kind}-{name}",
                spec=EvalSpec(
                    base=weights.base,
                    trust_remote_code=self._trusted(trained),
                    conversations=evaluation.conversations,
                    preferences=evaluation.preferences,
                    generation=evaluation.generation,
                    exact_match=evaluation.exact_match,
                    tasks=TaskQuestions(**evaluation.tasks.model_dump(exclude={"folder"}))
                    if evaluation.tasks
                    else None,
                    samples=evaluation.samples,
                ),
                artifacts=weights.artifacts
                | {
                    "tokenizer": (self._tokenizer(sft.tokenizer),),
                    "corpora": tuple(self._corpus(corpus) for corpus in evaluation.conversations),
                    "packs": tuple(
                        self._pack(pack_kind, corpus, sft.tokenizer, evaluation.packing)
                        for pack_kind, corpora in (
                            ("sft", evaluation.conversations),
                            ("preference", evaluation.preferences),
                        )
                        for corpus in corpora
                    ),
                    "ref_logps": references,
                },
                files={
                    "base": weights.files,
                    "tasks": task_files(folder).inside if folder else (),
                    "task_data": task_files(folder).outside if folder else (),
                },
                operation=Execution(gpus=sft.operation.gpus and 1),
            )
        )

    def _convert(self, name: str, gguf: Gguf) -> Job:
        kind, run = gguf.model.split(":")
        trained = self._sft(run) if kind == "sft" else self._dpo(run)
        return self._add(
            Job(stage="convert", name=name, spec=ConvertSpec(type=gguf.type), artifacts={"model": (trained,)})
        )

    def _report(self, variants: dict[str, dict[str, tuple[str, ...]]]) -> Job:
        # In one order, whatever the order of the config: the report is the same.
        stages = list(STAGES)
        shown = (job for job in self.jobs.values() if job.stage not in NOT_SHOWN)
        jobs = tuple(sorted(shown, key=lambda job: (stages.index(job.stage), job.name)))
        grids = {
            (section, variant): f"{section}.{name}"
            for section, names in variants.items()
            for name, made in names.items()
            for variant in made
            if variant != name
        }
        reported = tuple(
            ReportedJob(
                stage=job.stage,
                name=job.name,
                made_from={role: tuple(made.key for made in some) for role, some in job.artifacts.items() if some},
                asked_by=grids.get((job.stage, job.name), ""),
            )
            for job in jobs
        )
        return self._add(
            Job(
                stage="report",
                name="",
                spec=ReportSpec(**self.config.report.model_dump(), jobs=reported),
                artifacts={"results": jobs},
            )
        )


def _task_folder(evaluation: Evaluation) -> str | None:
    """Where its tasks lie; None of those that lm-evaluation-harness ships, which its version stands for."""
    return evaluation.tasks.folder if evaluation.tasks else None
