"""The initial weights of a run: a pretrained model, or the architecture of a new one."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from snaketune.config.base import LocalPath, Model, PositiveFloat, PositiveInt, Revision

Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Scratch(Model):
    """A new model with random weights, for the vocabulary of the run's tokenizer."""

    architecture: Literal["llama", "qwen2", "mistral", "phi3"] = "llama"
    """Model type in transformers. Note that for a `qwen2` folder, AutoTokenizer uses that family's own class, which splits
    texts differently than a tokenizer trained here."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width of the feed-forward layers."""
    layers: PositiveInt
    """Transformer blocks."""
    heads: PositiveInt
    """Attention heads."""
    key_value_heads: PositiveInt | None = None
    """Key and value heads, for grouped-query attention. Default: as many as `heads`."""
    tie_embeddings: bool = True
    """Shares the weights of the embedding and the output head."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    max_positions: PositiveInt = 2048
    """Longest sequence, in tokens, that the model supports."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    seed: Seed = 0
    """Seed of the initial weights."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} can't be divided among {self.heads} heads")
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.heads} heads is odd; rotary positions require an even head size"
            )
        if self.heads % (self.key_value_heads or self.heads):
            raise ValueError(f"{self.heads} heads can't be shared by {self.key_value_heads} key_value_heads")
        return self


class RopeScaling(Model):
    """Scaling of rotary position embeddings, for sequences longer than those that a model was pretrained on. It becomes part of
    the result's own config (`rope_parameters`, `max_position_embeddings`)."""

    type: Literal["linear", "yarn", "llama3"]
    """Type of the scaling, by its name in transformers. `yarn` (Peng et al., 2023) is usual; `linear` is position interpolation
    (Chen et al., 2023); `llama3` is that of Llama 3.1."""
    factor: Annotated[float, Field(gt=1)]
    """How many times longer sequences become."""
    original_max_position_embeddings: PositiveInt | None = None
    """The length that the model was pretrained on, in tokens. Default: that in the model's config, or its
    `max_position_embeddings`."""

    @property
    def longest(self) -> int | None:
        """Positions of the scaled model; None if that depends on the model's config."""
        return self.original_max_position_embeddings and int(self.original_max_position_embeddings * self.factor)

    @field_validator("type", mode="before")
    @classmethod
    def _independent_of_batch(cls, kind: Any) -> Any:
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"found {kind}, whose factors depend on the longest sequence of a batch, so packed documents would change each "
                "other; choose yarn"
            )
        return kind


class Pretrained(Model):
    """A pretrained model."""

    path: LocalPath
    """Local folder with config.json and safetensors, or Hub id, `owner/name`."""
    revision: Revision | None = None
    """Commit, tag or branch of a Hub model. The name identifies the weights: if a branch moves, nothing reruns."""
    trust_remote_code: bool = False
    """Allows Python code that comes with the model to run. Enable it only after reading that code."""
    rope: RopeScaling | None = None
    """Scales the model's rotary position embeddings to longer sequences, such as `{type: yarn, factor: 4}`."""


def _kind_of_base(base: Any) -> str:
    has_path = isinstance(base, Pretrained) or (isinstance(base, dict) and "path" in base)
    return "Pretrained" if has_path else "Scratch"


Base = Annotated[
    Annotated[Pretrained, Tag("Pretrained")] | Annotated[Scratch, Tag("Scratch")], Discriminator(_kind_of_base)
]
