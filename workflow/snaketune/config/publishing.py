"""`push:` and `gguf:`, how a result is handed on; off unless a config has them."""

from typing import Annotated, Literal

from pydantic import Field

from snaketune.config.base import NAME_PATTERN, Model, Revision

TrainedModel = Annotated[str, Field(pattern=f"^(sft|dpo):{NAME_PATTERN}$")]
# What the Hub allows: letters, digits, `-`, `_` and `.`, none of the last three doubled or at an end.
HUB_NAME = r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*"


class Push(Model):
    """A model to be pushed to the Hub by `snakemake push`, with its card; nothing else ever pushes."""

    model: TrainedModel
    """`sft:NAME` or `dpo:NAME`."""
    repository: Annotated[str, Field(pattern=f"^{HUB_NAME}/{HUB_NAME}$", max_length=96)]
    """`owner/name` on the Hub; made where it isn't there."""
    private: bool = True
    """Whether the repository is for its owner alone. One that is public already is refused unless this is `false`."""
    branch: Revision = "main"
    """Made where it isn't there."""


class Gguf(Model):
    """A model to be written as GGUF by `snakemake gguf`, with llama.cpp's own converter."""

    model: TrainedModel
    """`sft:NAME` or `dpo:NAME`, with its weights merged."""
    type: Literal["f16", "bf16", "q8_0"] = "f16"
    """Data type of the weights: 16 bits, or 8 bits in blocks."""
