"""The `tokenizers:` section: tokenizers that are trained here, or adopted from a model."""

from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from snaketune.config.base import CorpusName, Fraction, LocalPath, Model, Revision


class TokenizerTraining(Model):
    """A new sentencepiece vocabulary, trained on the train split of corpora."""

    corpora: Annotated[tuple[CorpusName, ...], Field(min_length=1)]
    """Corpora whose train rows the vocabulary is trained on."""
    model: Literal["bpe", "unigram"] = "bpe"
    """Byte-pair encoding (Sennrich et al., 2016) or a unigram language model (Kudo, 2018)."""
    vocab_size: Annotated[int, Field(ge=300, le=10_000_000)] = 32000
    """Number of tokens, including the 256 byte tokens and the special tokens."""
    character_coverage: Fraction = 0.9995
    """Share of the characters that the vocabulary covers; the others are encoded as bytes."""
    split_digits: bool = True
    """Makes each digit a separate token."""


# Inside the package, which can be installed without the repository; resources/chat_templates links to it.
DEFAULT_CHAT_TEMPLATE = Path(__file__).parent.parent / "tokenization/chat_templates/chatml.jinja"


class Tokenizer(Model):
    """A tokenizer: trained here, or adopted from a model, exactly one of the two."""

    train: TokenizerTraining | None = None
    adopt: LocalPath | None = None
    """Local folder or Hub id of a model whose fast tokenizer is used."""
    revision: Revision | None = None
    """Commit, tag or branch of an adopted Hub tokenizer."""
    chat_template: LocalPath | None = None
    """Jinja chat template, best with `{% generation %}` markers. Default: ChatML (`resources/chat_templates/chatml.jinja`) for
    a trained tokenizer, the model's own template for an adopted one."""
    template_date: date | None = None
    """Date that a chat template writes as today's, such as 2026-01-31; needed for templates that write one, so that the same
    rows give the same tokens tomorrow."""
    on_template_error: Literal["fail", "quarantine"] = "quarantine"
    """Treatment of rows that the chat template refuses or can't render completely. `quarantine` drops the row and records it
    with the reason in the stage's `quarantine.jsonl`, up to the corpus' `max_quarantined_fraction`; `fail` ends the
    `tokenize` stage with the first row's error."""

    @model_validator(mode="after")
    def _one_origin(self) -> "Tokenizer":
        if bool(self.train) == bool(self.adopt):
            raise ValueError("give exactly one of `train` and `adopt`")
        return self
