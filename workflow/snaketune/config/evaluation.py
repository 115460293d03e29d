"""`eval:` and `report:`, what is looked at."""

from typing import Annotated

from pydantic import Field, field_validator

from snaketune.config.base import NAME_PATTERN, Model, Name, PositiveInt
from snaketune.config.corpora import regex_with_one_group
from snaketune.config.packing import Packing
from snaketune.config.paths import LocalPath

ModelReference = Annotated[str, Field(pattern=f"^(base|sft|dpo):{NAME_PATTERN}$")]


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names themselves; ValueError if one is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is listed twice")
    return names


class ExactMatch(Model):
    """Greedy answers to held-out prompts, compared with the checkable answer."""

    answer_pattern: str = r"(?s)(.*)"
    """Regular expression with one group that finds the answer in what the model wrote."""
    limit: PositiveInt | None = None
    """At most so many prompts per corpus, the first by id."""

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        return regex_with_one_group(pattern)


class Generation(Model):
    """How responses to held-out prompts are generated, for exact match and samples: greedily."""

    max_new_tokens: PositiveInt = 64
    """Where a response ends at the latest."""
    batch_size: PositiveInt = 32
    """Prompts that are answered at a time."""


class Tasks(Model):
    """Tasks of lm-evaluation-harness, from local YAML files."""

    folder: LocalPath
    """Folder with the task files."""
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tasks, tags or groups that the files define."""
    limit: PositiveInt | None = None
    """At most so many documents of each task, the first ones."""
    batch_size: PositiveInt = 16
    """Requests that the model answers at a time."""


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
        return each_once(names)


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
        return each_once(entries)
