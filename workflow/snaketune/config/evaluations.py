"""`eval:` and `report:`, what is looked at."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import NAME_PATTERN, Model, Name, PositiveFloat, PositiveInt
from snaketune.config.corpus_sources import regex_with_one_group
from snaketune.config.packing import Packing
from snaketune.config.paths import LocalPath

ModelReference = Annotated[str, Field(pattern=f"^(base|sft|dpo):{NAME_PATTERN}$")]


def without_duplicates(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names themselves; ValueError if one is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is listed twice")
    return names


class ExactMatch(Model):
    """Answers to held-out prompts, compared with the checkable answer."""

    answer_pattern: str = r"(?s)(.*)"
    """Regular expression with one group that finds the answer in what the model wrote."""
    limit: PositiveInt | None = None
    """At most so many prompts per corpus, the first by id."""

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        return regex_with_one_group(pattern)


class Decoding(Model):
    """What shapes a response, besides model and prompt."""

    max_new_tokens: PositiveInt = 64
    """Where a response ends at the latest."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the likeliest token every time. Above it, tokens are drawn, from logits divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draws from the likeliest tokens that together have this probability."""
    top_k: PositiveInt | None = None
    """Draws from so many of the likeliest tokens."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1, tokens that stand in the prompt or were written already become less likely (Keskar et al., 2019)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the tokens that are drawn: the same seed draws the same for the same prompt."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response; it is what stands before the first of them."""

    @model_validator(mode="after")
    def _is_looked_at(self) -> Self:
        for key in ("top_p", "top_k", "seed"):
            if not self.temperature and getattr(self, key) != Decoding.model_fields[key].default:
                raise ValueError(
                    f"{key} is {getattr(self, key)}, but temperature is 0, so nothing is drawn; raise temperature, or leave "
                    f"{key} out"
                )
        return self


class Generation(Decoding):
    """How responses to held-out prompts are generated, for exact match and samples."""

    batch_size: PositiveInt = 32
    """Prompts that are answered at a time."""


class TaskSettings(Model):
    """What is asked of lm-evaluation-harness, wherever its tasks come from."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tasks, tags or groups."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question. Default: as many as the task says. A task that says 0 itself keeps that."""
    chat_template: Literal["auto"] | bool = "auto"
    """Asks in the frame of the model's chat template; `auto` does where the tokenizer has one."""
    few_shot_as_multiturn: bool = True
    """Under a chat template, each solved example is a turn of the user and one of the assistant; otherwise all are one turn."""
    system_instruction: str | None = None
    """Stands before every prompt; under a chat template as the system turn."""
    limit: PositiveInt | None = None
    """At most so many documents of each task, the first ones."""
    batch_size: PositiveInt = 16
    """Requests that the model answers at a time."""

    @model_validator(mode="after")
    def _is_looked_at(self) -> Self:
        if self.chat_template is False and not self.few_shot_as_multiturn:
            raise ValueError(
                "few_shot_as_multiturn is false, but there are no turns without a chat template; leave it out"
            )
        return self


class Tasks(TaskSettings):
    """Tasks of lm-evaluation-harness: those that it ships, or, with `folder`, those in local YAML files."""

    folder: LocalPath | None = None
    """Folder with task files, which then has all that `names` names. Default: what lm-evaluation-harness ships."""


class Evaluation(Model):
    """Models side by side on the same held-out rows."""

    models: Annotated[tuple[ModelReference, ...], Field(min_length=1)]
    """`base:NAME` (what the SFT run NAME starts from), `sft:NAME` or `dpo:NAME`. The name of a grid means all of it."""
    conversations: tuple[Name, ...] = ()
    """Corpora for held-out loss, exact match and samples."""
    preferences: tuple[Name, ...] = ()
    """Corpora for preference accuracy and margins."""
    packing: Packing = Packing()
    """How the held-out rows are packed, as for trainings."""
    generation: Generation = Generation()
    exact_match: ExactMatch = ExactMatch()
    tasks: Tasks | None = None
    samples: PositiveInt = 8
    """Generations per corpus that the report shows."""

    @field_validator("models", "conversations", "preferences")
    @classmethod
    def _asks_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return without_duplicates(names)


class Report(Model):
    """How the report looks; reruns nothing but the report."""

    title: str = "snaketune"
    """The headline."""
    note: str = ""
    """A line under the title: what this was for."""
    sort_by: str | None = None
    """The figure by which the runs of `dpo:` are sorted, as a dotted path into scores.json, such as
    `preferences.votes.reward_accuracy`. `results/best` then links to the model of the first."""
    compare: tuple[LocalPath, ...] = ()
    """Trainings of another time to compare with, on a page of their own: folders of results (`results/dpo/old`,
    `../before/results/sft/demo`), or fingerprints of kept work, at least the first 8 digits."""

    @field_validator("compare")
    @classmethod
    def _compares_once(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        return without_duplicates(entries)
