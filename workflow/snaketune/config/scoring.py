"""The `score:` section."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from snaketune.config.base import (
    LocalPath,
    Model,
    PositiveFloat,
    PositiveInt,
    RegexWithOneGroup,
    Revision,
    RewardReference,
    SampleName,
    ScoreName,
)
from snaketune.config.judging import ResponseJudge


class AnswerScore(Model):
    """1 for a response with the checkable answer of the corpus' row, else 0."""

    pattern: RegexWithOneGroup = r"(?s)(.*)"
    """Regular expression with one group that extracts the answer from the response, from its content where it has reasoning.
    Default: all of it."""


class RewardModel(Model):
    """A reward model: one output for a whole conversation (`AutoModelForSequenceClassification`), with a chat template."""

    model: RewardReference | None = None
    """`reward:NAME`: a reward model that this config trains, instead of `path`."""
    path: LocalPath | None = None
    """Local folder with config.json, safetensors and tokenizer, or Hub id, `owner/name`."""
    revision: Revision | None = None
    """Commit, tag or branch of a Hub model. The name identifies the weights: if a branch moves, nothing reruns."""
    trust_remote_code: bool = False
    """Allows Python code that comes with the model to run. Enable it only after reading that code."""
    batch_size: PositiveInt = 16
    """Responses per batch."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.model is None) == (self.path is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"expected either `model: reward:NAME` or `path` of a reward model; found {found}")
        if self.model and (self.revision or self.trust_remote_code):
            key = "revision" if self.revision else "trust_remote_code"
            raise ValueError(
                f"{key} applies to a reward model under `path`, and {self.model} is trained here; remove it"
            )
        return self


class ScoredBy(Model):
    """What a response is worth; exactly one of `answer`, `reward`, `judge`, `python` and `sum`."""

    answer: AnswerScore | None = None
    reward: RewardModel | None = None
    judge: ResponseJudge | None = None
    python: LocalPath | None = None
    """Python file that defines `score(prompt, response, row)`, which returns a number, several as a mapping of names, one of
    them `score`, or None for no score. `prompt` is a list of messages, `response` the text, `row` the other columns of the
    sample. It runs in a process of its own, with your rights: name only code that you trust."""
    seconds: PositiveFloat = 10.0
    """Longest time of a call of `python`; a response that takes longer has no score."""
    sum: Annotated[dict[ScoreName, float], Field(min_length=1)] | None = None
    """Weighted sum of other entries of `score:` of the same sample, by name, such as `{checked: 1.0, short: 0.1}`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        found = [key for key in ("answer", "reward", "judge", "python", "sum") if getattr(self, key) is not None]
        if len(found) != 1:
            raise ValueError(
                f"expected exactly one of answer, reward, judge, python and sum, found {' and '.join(found) or 'none'}"
            )
        if "seconds" in self.model_fields_set and not self.python:
            raise ValueError("seconds limits calls of python, and there is no python; remove it")
        return self


class Scoring(Model):
    """How responses are scored."""

    by: ScoredBy


class Score(Scoring):
    """Numbers for the responses of a sample, as a table."""

    samples: SampleName
    """Entry of `sample:`."""
