"""The `eval:` and `report:` sections."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from snaketune.config.base import (
    CorpusName,
    EvaluatedModel,
    LocalPath,
    Model,
    ModelReference,
    PositiveInt,
    RegexWithOneGroup,
    SftName,
)
from snaketune.config.generation import Engine, EngineChoice, Generation
from snaketune.config.judging import PairJudge
from snaketune.config.packing import Packing


def _without_duplicates(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is listed twice")
    return names


ListedOnce = AfterValidator(_without_duplicates)


class ExactMatch(Model):
    """Exact match of the model's answers to held-out prompts with the checkable answers."""

    answer_pattern: RegexWithOneGroup = r"(?s)(.*)"
    """Regular expression with one group that extracts the answer from the response. Default: the whole response."""
    limit: PositiveInt | None = None
    """Maximum number of prompts per corpus, the first by id. Default: all."""


class TaskSettings(Model):
    """Settings of lm-evaluation-harness for its own tasks and for local ones."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of tasks, tags or groups."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question. Default: as the task defines. A task that defines 0 always has 0."""
    chat_template: Literal["auto"] | bool = "auto"
    """Applies the model's chat template to prompts; `auto` does if the tokenizer has one."""
    few_shot_as_multiturn: bool = True
    """With a chat template, writes each solved example as a user and an assistant turn; `false` writes all into one turn."""
    system_instruction: str | None = None
    """Text before every prompt; with a chat template, the system turn."""
    limit: PositiveInt | None = None
    """Maximum number of documents per task, the first ones. Default: all."""
    batch_size: PositiveInt = 16
    """Requests per batch."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.chat_template is False and not self.few_shot_as_multiturn:
            raise ValueError(
                "few_shot_as_multiturn is false, but it has no effect with chat_template: false, as there are no turns; "
                "remove it"
            )
        return self


class Tasks(TaskSettings):
    """Tasks of lm-evaluation-harness: those that it ships, or, with `folder`, local ones."""

    folder: LocalPath | None = None
    """Folder with task files (YAML) that define all `names`. Default: the tasks that lm-evaluation-harness ships."""


class EvaluationEngine(EngineChoice):
    """The engine that generates responses for an evaluation. An edit reruns no finished evaluation; its manifest and the report
    say which engine made a score."""

    engine: Engine = "transformers"
    """As in `sample.operation.engine`."""


class Evaluation(Model):
    """Evaluation of several models on the same held-out rows."""

    models: Annotated[tuple[EvaluatedModel, ...], Field(min_length=1), ListedOnce]
    """Models: `base:NAME` (the initial weights of the SFT run NAME), `sft:NAME`, `dpo:NAME`, `merge:NAME`; or `reward:NAME`, of
    which `preferences` alone are evaluated. The name of a grid stands for all its runs."""
    conversations: Annotated[tuple[CorpusName, ...], ListedOnce] = ()
    """Corpora for held-out loss, exact match and samples."""
    preferences: Annotated[tuple[CorpusName, ...], ListedOnce] = ()
    """Corpora for preference accuracy and margins."""
    packing: Packing = Packing()
    """Packing of the held-out rows, with the keys of a run's `packing`."""
    generation: Generation = Generation()
    exact_match: ExactMatch = ExactMatch()
    tasks: Tasks | None = None
    judge: PairJudge | None = None
    """A model that compares the responses of `models` to held-out prompts with those of one of them, as win rates."""
    kl_from: ModelReference | None = None
    """A model, such as the one before a training: how far responses to held-out prompts are from it is measured as the KL
    divergence of each token's distribution. Both models are loaded."""
    teacher_of: SftName | None = None
    """An SFT run with `distill`: how often each model expects the same token as that run's teacher, and how far their
    probabilities are apart, is measured on the held-out rows of the run, at its temperature."""
    samples: PositiveInt = 8
    """Sample responses per corpus that the report shows."""
    operation: EvaluationEngine = EvaluationEngine()
    """Engine of the responses to held-out prompts. Losses and preferences are computed by the training's own engine."""

    @model_validator(mode="after")
    def _has_what_is_judged(self) -> Self:
        if self.judge and not self.conversations:
            raise ValueError("judge compares responses to held-out prompts of conversations; name corpora there")
        if self.kl_from and not self.conversations:
            raise ValueError("kl_from compares responses to held-out prompts of conversations; name corpora there")
        return self

    def every_model(self, variants: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
        """Yield the models, such as `dpo:demo`, with every run of a grid. Args: variants: as `config.load` returns them."""
        for reference in self.models:
            kind, name = reference.split(":")
            for variant in variants[kind if kind in ("dpo", "reward") else "sft"].get(name, (name,)):
                yield f"{kind}:{variant}"

    def every_policy(self, variants: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
        """Yield the models that write text, so all but reward models."""
        yield from (model for model in self.every_model(variants) if not model.startswith("reward:"))


class Report(Model):
    """Settings of the report; an edit reruns only the report."""

    title: str = "snaketune"
    """Title of the report."""
    note: str = ""
    """Text below the title, such as the purpose of the experiment."""
    sort_by: str | None = None
    """Score by which the runs of `dpo:` are sorted, as a dotted path into scores.json, such as
    `preferences.votes.reward_accuracy`. `results/best` links to the model of the best run. Default: sorted by name."""
    compare: Annotated[tuple[LocalPath, ...], ListedOnce] = ()
    """Earlier trainings to compare with, on a separate page: folders of results (`results/dpo/old`,
    `../before/results/sft/demo`), or fingerprints of work folders, at least their first 8 digits."""
