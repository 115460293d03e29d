"""What each stage is told: exactly the slice of the config that it reads, and nothing else.

A spec is a stage's whole knowledge of the config. Its canonical JSON is the rule's `params`, so that a key that isn't in
a spec can't change the stage's result, and a key that is in it can't change without a rerun.
"""

import json
from typing import Any, Literal

from snaketune.config.base import Fraction, Model
from snaketune.config.corpus_sources import CorpusContent
from snaketune.config.evaluations import ExactMatch, Generation, Report, TaskQuestions
from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import GradientCheckpointing, Launch, MicroBatchRows, ZeroStage
from snaketune.config.packing import Packing, PackingStrategy, TrainOn
from snaketune.config.training_runs import Learning, Lora, Precision, Pretrained, Quantization, Scratch

CorpusSpec = CorpusContent
Kind = Literal["sft", "preference", "unpaired"]


class TokenizerSpec(Model):
    """Either the settings of a training, or what to adopt."""

    model: Literal["bpe", "unigram"] | None = None
    vocab_size: int | None = None
    character_coverage: float | None = None
    split_digits: bool | None = None
    adopt: str | None = None
    revision: str | None = None


class TokenizeSpec(Model):
    """One part of a corpus; parts are numbered from 1."""

    kind: Literal["sft", "preference", "unpaired", "text"]
    train_on: TrainOn
    part: int
    parts: int
    most_refused: Fraction | None = None
    """The largest share of its rows that the chat template may refuse; none: the first ends the stage."""


class PlanSpec(Model):
    """Which sequence goes where."""

    kind: Kind
    lengths: tuple[int, ...]
    strategy: PackingStrategy
    overflow: Literal["drop", "truncate", "split", "raise"]


class WriteSpec(Model):
    """One part of the shards; parts are numbered from 1."""

    part: int
    parts: int


class PackSpec(Packing):
    """Rows of one kind."""

    kind: Kind


class SftSpec(Model):
    """Start and optimization."""

    base: Pretrained | Scratch | None
    """What it starts from, or what lies beneath the adapters that it starts from; None where that is a result in full."""
    training: Learning
    lora: Lora | None
    quantization: Quantization | None
    trust_remote_code: bool = False


class RefLogpsSpec(Model):
    """Everything besides weights and pairs that can change a log-probability; `training.reference.cache_key` lists it."""

    precision: Precision
    frozen_weights: bool
    """Whether the runs that read this train adapters only, on weights in the data type of the computation."""
    quantization: Quantization | None
    base: Pretrained | None = None
    """What lies beneath the reference where its results hold adapters alone; all of it where it is no result."""
    apart: bool = False
    """Whether the adapter of the uppermost result isn't merged, since a policy goes on training it."""
    token_logps: bool = False
    """Whether the log-probability of every token is kept."""
    trust_remote_code: bool


class RefPassSpec(RefLogpsSpec):
    """One part of the rows; parts are numbered from 1."""

    part: int
    parts: int


class DpoSpec(PreferenceLoss):
    """Loss and optimization."""

    training: Learning
    lora: Lora | None
    quantization: Quantization | None
    base: Pretrained | None = None
    """As for the reference."""
    continued: bool = False
    """Whether `lora` is that of the SFT run, whose adapter is trained further."""
    reference: Pretrained | None = None
    """The reference, where that isn't the model that the run starts from."""
    trust_remote_code: bool


class CalibrateSpec(Model):
    """Of a training, what its speed and its memory follow from; runs that agree on it share what is measured."""

    base: Pretrained | Scratch
    """Of preferences too: an SFT model is as large as its base."""
    run: SftSpec | DpoSpec
    """Without the keys that neither time nor memory follow from (`stages.plan.training_jobs`)."""
    gradient_checkpointing: GradientCheckpointing
    processes: int
    launch: Launch
    zero_stage: ZeroStage | None


class PreflightRun(Model):
    """One training of a family; several that differ in nothing of this are told once."""

    key: str
    """Where it is in the config: `sft.demo`."""
    kind: Kind
    run: SftSpec
    """What of it can be looked at beforehand; of preferences too."""
    reference: Pretrained | None
    """A model of its own that it is measured against."""
    pack: int
    """Which of the packs it trains on, counted from 0."""
    micro_batch_rows: MicroBatchRows
    gradient_checkpointing: GradientCheckpointing
    gpus: int
    nodes: int
    launch: Launch
    zero_stage: ZeroStage | None
    allow_cpu: bool


class PreflightEvaluation(Model):
    """What models of a family are asked about, and what they are trained on."""

    key: str
    """Where it is in the config: `eval.demo`."""
    corpora: tuple[str, ...]
    """Of whose held-out rows they are asked."""
    trained_on: tuple[str, ...]
    exact_match: tuple[str, ...]
    """Of `corpora`, those in which answers are looked for, where `exact_match` is asked for."""


class PreflightSpec(Model):
    """What is looked at before the first training of a family of runs."""

    base: Pretrained | Scratch
    runs: tuple[PreflightRun, ...]
    evaluations: tuple[PreflightEvaluation, ...] = ()


class TrialSpec(Model):
    """A short training of a diagnosis, with all that its speed follows from."""

    run: SftSpec | DpoSpec
    micro_batch_rows: MicroBatchRows
    gradient_checkpointing: GradientCheckpointing
    processes: int
    launch: Launch
    zero_stage: ZeroStage | None
    load_in_memory: Literal["auto"] | bool
    steps: int
    warmup_steps: int
    repeat: int
    """The round that it is of, counted from 1."""
    profile: bool = False
    """Whether two steps more are taken apart by torch.profiler."""


class Variant(Model):
    """A run that is tried: the baseline, which changes nothing, or one with a change."""

    name: str
    changes: dict[str, Any] = {}
    """By dotted key."""


class DiagnosisSpec(Model):
    """Whose trials are compared, in which order."""

    mode: Literal["one-at-a-time", "add-one-in"]
    variants: tuple[Variant, ...]
    """The baseline first; not by name, as a spec knows no order of keys."""
    repeats: int


class AuditSpec(Model):
    """A run that is looked at, and the trials of what looked wrong with it."""

    key: str
    """Where it is in the config: `sft.demo`."""
    kind: Kind
    training: Learning
    micro_batch_rows: MicroBatchRows
    gradient_checkpointing: GradientCheckpointing
    variants: tuple[Variant, ...]
    """The baseline first, in the order of the trials."""


class EvalSpec(Model):
    """What one model is asked."""

    base: Pretrained | Scratch | None
    """The model itself, or what lies beneath its adapters, where that is no artifact of this workflow."""
    trust_remote_code: bool
    conversations: tuple[str, ...]
    preferences: tuple[str, ...]
    generation: Generation
    exact_match: ExactMatch
    tasks: TaskQuestions | None
    """Of the files that it is given; without any, tasks that lm-evaluation-harness ships."""
    samples: int


class ReportedJob(Model):
    """A result that the report or a card tells of."""

    stage: str
    name: str
    made_from: dict[str, tuple[str, ...]] = {}
    """By role, the jobs that it was made from, as `stage/name`."""
    config_key: str = ""
    """The key of the config that asks for it, where that is a grid, `dpo.sweep`."""


class CorpusDescription(Model):
    """What a config says of a corpus for people alone."""

    license: str | None
    description: str | None


class CardSpec(Model):
    """Which model the card is of, what it tells of, and what of that no manifest says."""

    model: str
    """`sft:NAME` or `dpo:NAME`."""
    license: str | None
    corpora: dict[str, CorpusDescription]
    """That were trained on."""
    jobs: tuple[ReportedJob, ...]
    """In the order of the manifests; the model's own training first, then those that it goes on from."""


class ConvertSpec(Model):
    """What llama.cpp's converter is asked for."""

    type: Literal["f16", "bf16", "q8_0"]


class ReportSpec(Report):
    """The look of the report, and whose results it shows: a renamed run is the same result under another name."""

    jobs: tuple[ReportedJob, ...] = ()
    """In the order of the manifests."""


def canonical(spec: Model) -> str:
    """One spelling per meaning: sorted keys, no spaces, every default written out."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
