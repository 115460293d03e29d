"""The `push:` and `gguf:` sections: uploads to the Hub and conversions to GGUF, if a config has them."""

from typing import Annotated, Literal

from pydantic import Field

from snaketune.config.base import NAME_PATTERN, Model, Revision

TrainedModel = Annotated[str, Field(pattern=f"^(sft|dpo):{NAME_PATTERN}$")]
# The Hub's rules: letters, digits, `-`, `_` and `.`; the last three neither repeated nor at an end.
HUB_NAME = r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*"


class Push(Model):
    """A model that `snakemake push` pushes to the Hub, with its model card. No other command pushes."""

    model: TrainedModel
    """Model to push: `sft:NAME` or `dpo:NAME`."""
    repository: Annotated[str, Field(pattern=f"^{HUB_NAME}/{HUB_NAME}$", max_length=96)]
    """Repository on the Hub, `owner/name`; created if it doesn't exist."""
    private: bool = True
    """Creates a private repository, and refuses to push to an existing public one. Set `false` for a public repository."""
    branch: Revision = "main"
    """Branch of the repository; created if it doesn't exist."""


class Gguf(Model):
    """A model that `snakemake gguf` converts to GGUF, with llama.cpp's converter."""

    model: Annotated[str, Field(pattern=f"^(sft|dpo|merge):{NAME_PATTERN}$")]
    """Model to convert: `sft:NAME`, `dpo:NAME` or `merge:NAME`. A LoRA run needs `lora.merge: true`."""
    type: Literal["f16", "bf16", "q8_0"] = "f16"
    """Data type of the weights: 16-bit floats, or 8-bit blocks (`q8_0`)."""
