"""`corpora:` and `tokenizers:`, what goes in."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from snaketune.config.base import Fraction, Model, Name

Layout = Literal["auto", "messages", "sharegpt", "alpaca", "prompt-response", "pairs", "transcripts"]


class HubDataset(Model):
    """A dataset on the Hugging Face Hub, read through `datasets`."""

    path: str
    """Repository id, for instance `openai/gsm8k`."""
    name: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str = "train"
    revision: str
    """Commit, tag or branch. A commit is the only one that can't change under you."""


class Fields(Model):
    """Which columns hold what, for files in no known layout.

    A value is a column name, or a template over columns such as `"{Body} {Question}"`.
    """

    system: str | None = None
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    answer: str | None = None
    """The checkable answer of the last assistant turn, for exact match."""
    task: str | None = None
    """A label to group exact match by."""

    @model_validator(mode="after")
    def _whole(self) -> "Fields":
        named = {key for key in ("prompt", "response", "chosen", "rejected") if getattr(self, key)}
        if named and named not in ({"prompt", "response"}, {"prompt", "chosen", "rejected"}):
            raise ValueError("map either prompt and response, or prompt, chosen and rejected")
        return self


class Source(Model):
    """One place that rows come from: local files, or a Hub dataset."""

    files: tuple[str, ...] = ()
    """Local files, relative to the working directory: .json, .jsonl, .csv, .parquet or .arrow, each also as .gz."""
    hub: HubDataset | None = None
    layout: Layout = "auto"
    """How a row is laid out; `auto` recognises it by its columns."""
    fields: Fields = Fields()

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
        if bool(self.files) == bool(self.hub):
            raise ValueError("give exactly one of `files` and `hub`")
        return self


class Corpus(Model):
    """Raw rows to canonical conversations or preference pairs, split by prompt."""

    kind: Literal["conversations", "preferences"]
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    held_out: Fraction = 0.05
    """Share of the prompts held out for evaluation; 1 makes the whole corpus an evaluation set."""
    split_seed: Annotated[int, Field(ge=0)] = 0
    """Which prompts are held out. Corpora with the same seed and share agree on every prompt they have in common."""
    answer_pattern: str | None = None
    """Regular expression with one group that finds the checkable answer in the last assistant turn,
    where no column holds it."""
    max_quarantined_fraction: Fraction = 0.01
    """The stage fails when a larger share of the rows is malformed."""

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return pattern if pattern is None else regex_with_one_group(pattern)


def regex_with_one_group(pattern: str) -> str:
    """`pattern` itself, if it compiles and has exactly one group; ValueError otherwise."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"needs exactly one group in parentheses, has {groups}")
    return pattern


class TokenizerTraining(Model):
    """A new sentencepiece vocabulary, trained on the train split of corpora."""

    corpora: Annotated[tuple[Name, ...], Field(min_length=1)]
    model: Literal["bpe", "unigram"] = "bpe"
    vocab_size: Annotated[int, Field(ge=300, le=10_000_000)] = 32000
    """Pieces, the 256 bytes and the special tokens included."""
    character_coverage: Fraction = 0.9995
    """Share of the characters that get a piece of their own; the rest is spelled in bytes."""
    split_digits: bool = True
    """Each digit is a token of its own."""


class Tokenizer(Model):
    """Trained here, or adopted from a base model."""

    train: TokenizerTraining | None = None
    adopt: str | None = None
    """Local folder or Hub id of a model whose fast tokenizer is taken."""
    revision: str | None = None
    """Commit, tag or branch of an adopted Hub tokenizer."""
    chat_template: str | None = None
    """Jinja file with `{% generation %}` markers. Default: ChatML (`resources/chat_templates/chatml.jinja`) for a
    trained tokenizer, the model's own template for an adopted one if it has the markers."""

    @model_validator(mode="after")
    def _one_origin(self) -> "Tokenizer":
        if bool(self.train) == bool(self.adopt):
            raise ValueError("give exactly one of `train` and `adopt`")
        return self
