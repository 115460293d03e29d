"""The spec of each stage: exactly the slice of the config that it reads.

A stage sees nothing else of the config. A key that isn't in the spec can't change the stage's result, and a key that is in it
can't change without a rerun.
"""

import json
from datetime import date
from typing import Any, Literal, TypeVar

from snaketune.config.base import Fraction, Model
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.corpora import Cleaning, CorpusContent, NearDuplicates, Repair
from snaketune.config.corpus_sources import EmptyReasoning, Reasoning, Source
from snaketune.config.distillation import DistillLoss
from snaketune.config.evaluations import ExactMatch, Report, TaskSettings
from snaketune.config.generation import Decoding, Generation
from snaketune.config.held_out import RaceMetric
from snaketune.config.lora import Lora, Quantization
from snaketune.config.losses import PreferenceLoss
from snaketune.config.operation import GradientCheckpointing, Launch, MicroBatchRows, ZeroStage
from snaketune.config.packing import Packing, PackingStrategy, TrainingOrder, TrainOn
from snaketune.config.scoring import AnswerScore
from snaketune.config.training_runs import Learning, Precision, SftLoss

CorpusSpec = CorpusContent
Kind = Literal["sft", "preference", "unpaired"]
AnyModel = TypeVar("AnyModel", bound=Model)


class Part(Model):
    """One part of a stage's work; parts are numbered from 1."""

    part: int
    parts: int


class ReadSpec(Model):
    """What the rows of some sources are read by; not which of them are used."""

    kind: Literal["conversations", "preferences", "unpaired", "text"]
    sources: tuple[Source, ...]
    # Of each file, which of how many equal pieces are read: the first, the last, the number of all. Empty: whole files.
    ranges: tuple[tuple[int, int, int], ...] = ()
    split_seed: int
    order_column: str | None
    answer_pattern: str | None
    repair: tuple[Repair, ...]
    cleaning: Cleaning
    near_duplicates: NearDuplicates | None
    ngram: int | None  # words per n-gram that rows are compared by with evaluation data
    own_held_out: bool  # whether they are compared with the corpus' held-out rows later


class DecideSpec(CorpusContent):
    """The corpus, and of each part the numbers of its sources."""

    sources_of_parts: tuple[tuple[int, ...], ...]


class FilterSpec(Part):
    """The part of a corpus' files to be written."""


class TokenizerSpec(Model):
    """The settings of a tokenizer's training, or the tokenizer to adopt."""

    model: Literal["bpe", "unigram"] | None = None
    vocab_size: int | None = None
    character_coverage: float | None = None
    split_digits: bool | None = None
    adopt: str | None = None
    revision: str | None = None
    template_date: date | None = None


class TokenizeSpec(Part):
    kind: Literal["sft", "preference", "unpaired", "text"]
    train_on: TrainOn
    reasoning: Reasoning | None = None  # None: conversations are as the chat template writes them
    empty_reasoning: EmptyReasoning = "mask"
    # The largest share of its rows that the chat template may refuse; None: the first refused row ends the stage.
    most_refused: Fraction | None = None


class PlanSpec(Model):
    kind: Kind
    lengths: tuple[int, ...]
    strategy: PackingStrategy
    overflow: Literal["drop", "truncate", "split", "raise"]
    order: TrainingOrder = "shuffled"


class WriteSpec(Part):
    """The part of the shards to be written."""


class PackSpec(Packing):
    kind: Kind


class SftSpec(Model):
    """Initial weights and optimization of an SFT run."""

    # The initial weights, or the base layers of the adapters among them; None if a result holds all initial weights.
    base: Pretrained | Scratch | None
    training: Learning
    loss: SftLoss = "nll"
    distill: DistillLoss | None = None
    lora: Lora | None
    quantization: Quantization | None
    trust_remote_code: bool = False


class FrozenSpec(Model):
    """Everything besides weights and rows that affects the logits of a model that isn't trained."""

    precision: Precision
    # Whether the runs that read this train adapters only, with base weights in the data type of the computation.
    frozen_weights: bool
    quantization: Quantization | None
    # The base layers if the model's results hold adapters only; the whole model if it is no result.
    base: Pretrained | Scratch | None = None
    apart: bool = False  # whether the adapter of the last result isn't merged, since a policy continues training it
    trust_remote_code: bool


class RefLogpsSpec(FrozenSpec):
    """Everything besides weights and pairs that affects a log-probability; `training.reference.cache_key` lists it."""

    token_logps: bool = False  # whether the log-probability of each token is stored


class TeacherSpec(FrozenSpec):
    """A teacher, and what is stored of it for each supervised token."""

    k: int
    temperature: float


class TeacherPassSpec(TeacherSpec, Part):
    """One part of the rows of a teacher's pass."""


class RefPassSpec(RefLogpsSpec, Part):
    """One part of the rows of a reference pass."""


class DpoSpec(PreferenceLoss):
    """Loss and optimization of a DPO run."""

    training: Learning
    lora: Lora | None
    quantization: Quantization | None
    base: Pretrained | None = None  # the base layers, as in `RefLogpsSpec`
    continued: bool = False  # whether `lora` is that of the run before, whose adapter is trained further
    # The reference, if it isn't the model that the run starts from: a model from outside, or another result.
    reference: Pretrained | Literal["result"] | None = None
    trust_remote_code: bool


class Launched(Model):
    """How the processes of a training are launched and what they hold, on which its speed and memory depend."""

    gradient_checkpointing: GradientCheckpointing
    launch: Launch
    zero_stage: ZeroStage | None
    activation_offloading: bool = False


class RewardSpec(Model):
    """Loss and optimization of a reward model."""

    training: Learning
    center_rewards_coefficient: float | None = None
    margin: bool = False
    lora: Lora | None
    quantization: Quantization | None
    base: Pretrained | None = None  # the base layers, as in `RefLogpsSpec`
    trust_remote_code: bool


# Of all trainings.
TrainingSpec = SftSpec | DpoSpec | RewardSpec


class CalibrateSpec(Launched):
    """The settings of a training that its speed and memory depend on; runs with equal ones share the measurement."""

    base: Pretrained | Scratch  # also for preferences: an SFT model is as large as its base
    run: TrainingSpec  # without the keys that affect neither time nor memory (`stages.plan.training_jobs`)
    processes: int


class EarlierTraining(Model):
    """A training that a run continues: what it trains, and on which of the job's packs."""

    lora: Lora | None
    trainable: str | None
    pack: int


class PreflightRun(Launched):
    """One training of a family; several that differ in none of these fields are checked once."""

    key: str  # its key in the config: `sft.demo`
    kind: Kind
    run: SftSpec  # the settings that can be checked beforehand; for preferences too
    reference: Pretrained | None  # the reference model, if it is a model of its own
    pack: int  # the index of its pack among the job's packs, from 0
    earlier: tuple[EarlierTraining, ...] = ()  # the trainings that it continues
    needs_reference: bool = False  # whether its loss compares the policy with a reference
    rewards: bool = False  # whether it trains a reward model
    raced: bool = False  # whether a race compares it with other variants
    micro_batch_rows: MicroBatchRows
    gpus: int
    nodes: int
    allow_cpu: bool


class PreflightEvaluation(Model):
    """An evaluation of models of a family: its corpora, and those that the models are trained on."""

    key: str  # its key in the config: `eval.demo`
    corpora: tuple[str, ...]
    trained_on: tuple[str, ...]
    exact_match: tuple[str, ...]  # the corpora whose answers are compared, if `exact_match` is configured


class PreflightSpec(Model):
    """The runs and evaluations that are checked before the first training of a chain of runs."""

    base: Pretrained | Scratch
    runs: tuple[PreflightRun, ...]
    evaluations: tuple[PreflightEvaluation, ...] = ()


class TimingSpec(Launched):
    """A short training that is timed, with every setting that its speed depends on."""

    run: SftSpec | DpoSpec
    micro_batch_rows: MicroBatchRows
    processes: int
    load_in_memory: Literal["auto"] | bool
    steps: int
    repeat: int  # the round that it belongs to, from 1
    profile: bool = False  # whether two further steps are recorded by torch.profiler


class Variant(Model):
    """A run that is timed: the baseline, which changes nothing, or one with changes by dotted key."""

    name: str
    changes: dict[str, Any] = {}
    baseline: dict[str, Any] = {}  # the values of the same keys in the baseline


class BottleneckSpec(Model):
    """A run that is examined, and its variants."""

    key: str  # its key in the config: `sft.demo`
    # The baseline first, in the order of their timings; a tuple, since a spec ignores the order of keys.
    variants: tuple[Variant, ...]


class VerificationSpec(Model):
    """A finished training that is checked."""

    run: SftSpec | DpoSpec  # the training's own spec
    rows: int
    conversations: tuple[str, ...] = ()  # the corpora of its evaluation, in the order of the evaluated packs
    preferences: tuple[str, ...] = ()
    gguf_type: str | None = None  # of its GGUF file; None if there is none


class ReproductionSpec(Model):
    """A finished training whose first steps are computed once more."""

    run: SftSpec | DpoSpec  # the training's own spec
    steps: int = 20  # at least so many


class PromptsSpec(Model):
    """The prompts of a sample, and what they must fit into; see `config.sampling.Prompts`."""

    corpora: tuple[str, ...]
    split: Literal["train", "held_out"]
    limit: int | None
    turns: Literal["last", "all"]
    longest: int | None
    template_variables: dict[str, Any]
    base: Pretrained | Scratch  # the model below the sampled one, which has as many positions
    new_tokens: int
    skip: int = 0
    solved: float = 1.0  # by the job's scores
    unsolved: float = 1.0


class ResponsesSpec(Model):
    """Everything besides prompts and tokenizer that affects responses; engines differ by rounding only."""

    # The model itself, or the base layers of its adapters, if that is no result of this workflow.
    base: Pretrained | Scratch | None
    trust_remote_code: bool
    frozen_weights: bool  # as in `RefLogpsSpec`, so that an evaluation of the model finds the same responses
    decoding: Decoding
    responses: int


class GenerateSpec(ResponsesSpec, Part):
    """One part of the responses of a sample."""

    # By name, and a server by that of its model, so that parts of several aren't joined.
    engine: str
    # Which responses a part has follows from the batches. Kept rows are found with another size, too.
    batch_size: int


class SampleSpec(ResponsesSpec):
    """A sample."""

    # Only with `reruns_on: {sample: versions}`; otherwise another engine reruns no finished sample.
    engine: str | None = None


class ScoreSpec(Model):
    """What the responses of a sample are worth; exactly one of `answer`, `python` and `weights`."""

    answer: AnswerScore | None = None
    python: bool = False  # whether the job's Python file scores them
    seconds: float = 0.0  # the longest time of a call
    weights: tuple[float, ...] = ()  # of the job's scores, in their order


class JudgeModelSpec(Model):
    """A model that judges, and what affects its replies besides the questions."""

    server_model: str | None  # the name by which a server calls it, or
    # the model itself, or the base layers of its adapters, if that is no result of this workflow.
    base: Pretrained | Scratch | None
    trust_remote_code: bool
    frozen_weights: bool  # as in `ResponsesSpec`
    max_new_tokens: int
    batch_size: int  # as in `GenerateSpec`; 0 for a server


class JudgeSpec(JudgeModelSpec):
    """Scores of a sample's responses by a judge."""

    scale: tuple[float, float]
    pattern: str
    json_reply: bool


class CompareSpec(JudgeModelSpec):
    """Verdicts of a judge on a model's responses and those of another."""

    prompts: int  # per corpus


class RateSpec(Model):
    """Scores of a sample's responses by a reward model."""

    base: Pretrained | None  # None if the job has the result of a `reward` run
    batch_size: int  # a score doesn't depend on its batch, except for rounding


class SelectSpec(Model):
    """Which scored responses become rows of a corpus of a kind; see `config.corpus_sources.Source`."""

    kind: Literal["conversations", "preferences", "unpaired"]
    margin: float
    per_prompt: int
    rows: Literal["best", "all"]
    at_least: float | None
    good_from: float | None
    bad_to: float | None
    min_rows: int | None = None


class EvalSpec(Model):
    """The evaluation of one model."""

    # The model itself, or the base layers of its adapters, if that is no result of this workflow.
    base: Pretrained | Scratch | None
    trust_remote_code: bool
    conversations: tuple[str, ...]
    preferences: tuple[str, ...]
    generation: Generation
    exact_match: ExactMatch
    tasks: TaskSettings | None  # tasks from the job's task files; without files, tasks that lm-evaluation-harness ships
    samples: int
    judged: int  # prompts per corpus that have a response for a judge
    kl: bool = False  # whether the divergence from another model is measured
    kl_base: Pretrained | Scratch | None = None  # that model itself, or the base layers of its adapters, as `base`
    teacher_temperature: float | None = None  # that of the job's teacher, with which the model is compared
    rewards: bool = False  # whether it is a reward model, of which preferences alone are evaluated


class RaceSpec(Model):
    """The comparison of the variants of a grid at one rung."""

    metric: RaceMetric
    keep: int
    tolerance: float
    looks: int  # the number of rungs of the race
    rung: float
    runs: tuple[str, ...]  # the variants as `stage/name`, in the order of their evaluations


class ReportedJob(Model):
    """A result that the report or a card shows."""

    stage: str
    name: str
    made_from: dict[str, tuple[str, ...]] = {}  # by role, the jobs that it was made from, as `stage/name`
    config_key: str = ""  # the config key of the grid that the run belongs to, `dpo.sweep`; empty for other runs


class CorpusDescription(Model):
    """License and description of a corpus, which no manifest holds."""

    license: str | None
    description: str | None


class CardSpec(Model):
    """The model of a card, the results that the card shows, and the texts that no manifest holds."""

    model: str  # `sft:NAME` or `dpo:NAME`
    license: str | None
    corpora: dict[str, CorpusDescription]  # license and description of each corpus that was trained on
    # In the order of the manifests; the model's own training first, then those that it continues.
    jobs: tuple[ReportedJob, ...]


class MergedModel(Model):
    """One of the models whose weights are merged."""

    weight: float
    results: int  # how many of the job's models it consists of, from the top down
    base: Pretrained | Scratch | None  # the base layers below them, if the last of them holds an adapter only


class MergeSpec(Model):
    models: tuple[MergedModel, ...]
    method: Literal["linear", "slerp"]
    trust_remote_code: bool


class ConvertSpec(Model):
    type: Literal["f16", "bf16", "q8_0"]


class ReportSpec(Report):
    """The settings of the report, and the results that it shows; a renamed run is the same result under another name."""

    jobs: tuple[ReportedJob, ...] = ()  # in the order of the manifests


def spec_from(model: type[AnyModel], *sections: Model | None, **values: Any) -> AnyModel:
    """A model with these values, and for its other fields the attributes of that name of config sections."""
    found = {
        name: getattr(section, name) for section in sections for name in model.model_fields if hasattr(section, name)
    }
    return model(**(found | values))


def canonical(spec: Model) -> str:
    """A spec as canonical JSON: sorted keys, no spaces, all defaults included."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
