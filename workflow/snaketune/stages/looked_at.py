"""What of a config looks at trainings and tries them: preflight, calibrations, diagnoses, audits, and their short trainings."""

from collections.abc import Iterable, Iterator
from typing import Any

from snaketune.config.diagnose import BASELINE, Diagnosis, doubtful, variants_of
from snaketune.config.evaluation import Evaluation
from snaketune.config.operation import Execution
from snaketune.config.runs import Dpo, Sft
from snaketune.stages.jobs import Job, short_digest
from snaketune.stages.portioned import (
    execution_of,
    kind_of_pairs,
    learning_of,
    sized,
    to_look_at,
    tried,
    waits_for,
)
from snaketune.stages.specs import (
    AuditSpec,
    DiagnosisSpec,
    DpoSpec,
    PreflightEvaluation,
    PreflightRun,
    PreflightSpec,
    SftSpec,
    Variant,
    canonical,
)
from snaketune.stages.starts import Starts, kept
from snaketune.stages.weights import Weights

# Of the short trainings by which a run is looked at.
AUDITED = {"steps": 20, "warmup_steps": 3}


class LookedAt(Starts):
    """That part of `stages.asked`; what it asks for besides is found there."""

    jobs: dict[tuple[str, str], Job]
    variants: dict[str, dict[str, tuple[str, ...]]]
    # By section and name: a run, its rows, and what measures trainings like it.
    _trainings: dict[tuple[str, str], tuple[Sft | Dpo, Job, Job]]

    def _corpus(self, name: str) -> Job:
        raise TypeError("a subclass defines this")

    def _sft_pack(self, run: Sft) -> Job:
        raise TypeError("a subclass defines this")

    def _sft_spec(self, name: str, run: Sft) -> SftSpec:
        raise TypeError("a subclass defines this")

    def _dpo_spec(self, run: Dpo) -> DpoSpec:
        raise TypeError("a subclass defines this")

    def _family(self, name: str) -> str:
        """The SFT run at the beginning of those that go on from each other up to this one."""
        run = self.config.sft[name]
        return self._family(run.continues) if run.continues else name

    @kept
    def _preflight(self, family: str) -> Job:
        """What looks at the trainings of a family before the first of them."""
        sft = {name: run for name, run in self.config.sft.items() if self._family(name) == family}
        dpo = {name: run for name, run in self.config.dpo.items() if run.from_ in sft}
        trained = {f"sft.{name}": (run, "sft", self._sft_pack(run)) for name, run in sft.items()}
        trained |= {f"dpo.{name}": (run, kind_of_pairs(run), self._preference_pack(run)) for name, run in dpo.items()}
        # In one order, whatever that of the config.
        trained = dict(sorted(trained.items()))
        packs = tuple({pack.manifest: pack for _, _, pack in trained.values()}.values())
        told: dict[str, PreflightRun] = {}
        for key, (run, kind, pack) in trained.items():
            lora = run.lora if isinstance(run, Sft) else self._lora_of(run)
            looked_at = to_look_at(key, run, lora, kind, packs.index(pack))
            told.setdefault(canonical(looked_at.model_copy(update={"key": ""})), looked_at)
        asked = {f"sft:{name}" for name in sft} | {f"dpo:{name}" for name in dpo} | {f"base:{name}" for name in sft}
        evaluations = tuple(
            self._evaluated(name, evaluation, models)
            for name, evaluation in sorted(self.config.eval.items())
            if (models := sorted(asked.intersection(expanded(evaluation, self.variants))))
        )
        evaluated = {corpus for evaluation in evaluations for corpus in evaluation.corpora}
        base = self._shape(family)
        return self._add(
            Job(
                stage="preflight",
                name=family,
                spec=PreflightSpec(base=base, runs=tuple(told.values()), evaluations=evaluations),
                artifacts={
                    "tokenizer": (self._tokenizer(sft[family].tokenizer),),
                    "packs": packs,
                    # Of each pack the one that it is of.
                    "corpora": tuple(
                        next(self._corpus(run.corpus) for run, _, own in trained.values() if own is pack)
                        for pack in packs
                    ),
                    "evaluated": tuple(map(self._corpus, sorted(evaluated))),
                },
                files={"base": Weights(base=base).files},
                operation=Execution(gpus=max(min(run.operation.gpus, 1) for run, _, _ in trained.values())),
            )
        )

    def _evaluated(self, name: str, evaluation: Evaluation, models: Iterable[str]) -> PreflightEvaluation:
        return PreflightEvaluation(
            key=f"eval.{name}",
            corpora=(*evaluation.conversations, *evaluation.preferences),
            trained_on=tuple(sorted(set().union(*map(self._trained_on, models)))),
            # Documents ask nothing.
            exact_match=tuple(
                corpus
                for corpus in evaluation.conversations
                if "exact_match" in evaluation.model_fields_set and self.config.corpora[corpus].kind != "text"
            ),
        )

    def _trained_on(self, model: str) -> set[str]:
        """The corpora that a model, such as `dpo:demo`, has learned from when it is evaluated."""
        kind, name = model.split(":")
        if kind == "dpo":
            run = self.config.dpo[name]
            return {run.corpus} | self._trained_on(f"sft:{run.from_}")
        own = self.config.sft[name]
        before = self._trained_on(f"sft:{own.continues}") if own.continues else set()
        return before | ({own.corpus} if kind == "sft" else set())

    def _calibrate(self, run: Sft | Dpo, spec: SftSpec | DpoSpec, sft: str, pack: Job) -> Job:
        """What measures in which portions a training like this one is fastest. Args: sft: the run whose model it is."""
        base, tokenizer = self._shape(sft), self.config.sft[sft].tokenizer
        told = sized(run, spec, base)
        name = f"{pack.name}-{short_digest(told, pack.name)}"
        known = self.jobs.get(("calibrate", name))
        # One of several families whose trainings are alike is looked at.
        return known or self._add(
            Job(
                stage="calibrate",
                name=name,
                spec=told,
                artifacts={"pack": (pack,), "tokenizer": (self._tokenizer(tokenizer),)},
                files={"base": Weights(base=base).files},
                operation=Execution(**run.operation.model_dump(), micro_batch_rows=run.training.micro_batch_rows),
                after=(self._preflight(self._family(sft)),),
            )
        )

    def _diagnosis(self, name: str, diagnosis: Diagnosis) -> Job:
        """What compares the trials of a diagnosis. In each round every variant has one, each after the one before it: side by
        side, even on other GPUs, they would take from each other."""
        section, _, of = diagnosis.run.partition(":")
        runs = diagnosis.variants(name, getattr(self.config, section)[of])
        told = diagnosis.model_dump(include={"steps", "warmup_steps"})
        trials: list[Job] = []
        for repeat in range(1, diagnosis.repeats + 1):
            for variant, run in runs.items():
                trials.append(
                    self._trial(f"{name}/{variant}/{repeat}", of, run, tuple(trials[-1:]), **told, repeat=repeat)
                )
        spec = DiagnosisSpec(mode=diagnosis.mode, variants=_variants(diagnosis.changes), repeats=diagnosis.repeats)
        return self._add(Job(stage="diagnosis", name=name, spec=spec, artifacts={"trials": tuple(trials)}))

    def _audits(self) -> None:
        """What looks at each run; of those that take the same time and memory, at the first by name."""
        seen: set[tuple[str, str]] = set()
        for (section, name), (run, pack, calibrated) in sorted(self._trainings.items(), key=lambda entry: entry[0]):
            alike = calibrated.name, str(run.training.micro_batch_rows)
            if alike not in seen:
                self._audit(section, name, run, pack, calibrated)
            seen.add(alike)

    def _audit(self, section: str, name: str, run: Sft | Dpo, pack: Job, calibrated: Job) -> None:
        """What looks at a run, and tries what looks wrong with it."""
        doubts = doubtful(run)
        trials: list[Job] = []
        for variant, one in variants_of("doctor", doubts, run).items():
            told = AUDITED | {"repeat": 1, "profile": variant == BASELINE}
            trials.append(self._trial(f"doctor-{section}-{name}/{variant}/1", name, one, tuple(trials[-1:]), **told))
        told = AuditSpec(
            key=f"{section}.{name}",
            kind="sft" if isinstance(run, Sft) else kind_of_pairs(run),
            training=learning_of(run),
            **run.training.model_dump(include={"micro_batch_rows", "gradient_checkpointing"}),
            variants=_variants(doubts),
        )
        looked_at = self._preflight(self._family(name if isinstance(run, Sft) else run.from_))
        before = {"pack": (pack,), "preflight": (looked_at,), "calibrate": (calibrated,)}
        self._add(Job(stage="audit", name=f"{section}-{name}", spec=told, artifacts=before | {"trials": tuple(trials)}))

    def _trial(self, name: str, of: str, run: Sft | Dpo, before: tuple[Job, ...], **told: int) -> Job:
        """A short training.

        Args:
            of: the name of the run that it is a variant of.
            before: the trial before it.
            told: as `portioned.tried`.
        """
        if isinstance(run, Sft):
            sft, start, pack, spec, references = (
                of,
                self._start_of(run),
                self._sft_pack(run),
                self._sft_spec(of, run),
                (),
            )
        else:
            sft, start, pack, spec = run.from_, self._start_of_dpo(run), self._preference_pack(run), self._dpo_spec(run)
            references = self._references(run)
        looked_at, calibrated = self._preflight(self._family(sft)), self._calibrate(run, spec, sft, pack)
        return self._add(
            Job(
                stage="trial",
                name=name,
                spec=tried(run, spec, **told),
                artifacts=start.artifacts
                | {"pack": (pack,), "tokenizer": (self._tokenizer(self.config.sft[sft].tokenizer),)}
                | {"ref_logps": references},
                files={"base": start.files},
                operation=execution_of(run, looked_at, calibrated),
                after=(*waits_for(run, looked_at, calibrated), *before),
            )
        )


def _variants(changes: dict[str, dict[str, Any]]) -> tuple[Variant, ...]:
    """The baseline and what changes it, in the order of their trials."""
    return (Variant(name=BASELINE), *(Variant(name=name, changes=change) for name, change in changes.items()))


def expanded(evaluation: Evaluation, variants: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
    for reference in evaluation.models:
        kind, name = reference.split(":")
        for variant in variants["dpo" if kind == "dpo" else "sft"].get(name, (name,)):
            yield f"{kind}:{variant}"
