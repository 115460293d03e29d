"""`tokenizers:`, trained here or adopted."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from snaketune.config.base import Fraction, Model, Name, Revision
from snaketune.config.paths import LocalPath


class TokenizerTraining(Model):
    """A new sentencepiece vocabulary, trained on the train split of corpora."""

    corpora: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Whose train rows the pieces are learned from."""
    model: Literal["bpe", "unigram"] = "bpe"
    """Byte-pair encoding (Sennrich et al., 2016) or a unigram language model (Kudo, 2018)."""
    vocab_size: Annotated[int, Field(ge=300, le=10_000_000)] = 32000
    """Pieces, the 256 bytes and the special tokens included."""
    character_coverage: Fraction = 0.9995
    """Share of the characters that get a piece of their own; the rest is spelled in bytes."""
    split_digits: bool = True
    """Each digit is a token of its own."""


# In the package, which may be installed without the rest of the repository; resources/chat_templates links to it.
DEFAULT_CHAT_TEMPLATE = Path(__file__).parent.parent / "tokenization/chat_templates/chatml.jinja"


class Tokenizer(Model):
    """Trained here, or adopted from a base model."""

    train: TokenizerTraining | None = None
    adopt: LocalPath | None = None
    """Local folder or Hub id of a model whose fast tokenizer is taken."""
    revision: Revision | None = None
    """Commit, tag or branch of an adopted Hub tokenizer."""
    chat_template: LocalPath | None = None
    """Jinja file with `{% generation %}` markers. Default: ChatML (`resources/chat_templates/chatml.jinja`) for a
    trained tokenizer, the model's own template for an adopted one if it has the markers."""
    on_template_error: Literal["fail", "quarantine"] = "fail"
    """What becomes of a row that the chat template refuses or can't write whole: it ends the `tokenize` stage; or it is listed
    with the reason in that stage's `quarantine.jsonl` and left out, up to the corpus' `max_quarantined_fraction`."""

    @model_validator(mode="after")
    def _one_origin(self) -> "Tokenizer":
        if bool(self.train) == bool(self.adopt):
            raise ValueError("give exactly one of `train` and `adopt`")
        return self
