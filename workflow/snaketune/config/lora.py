"""Low-rank adapters, and the 4-bit base weights below them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from snaketune.config.base import Model, PositiveFloat, PositiveInt, Regex

ModuleName = Annotated[str, Field(min_length=1)]
# Initial adapters that take the place of a part of the base weights, which are changed to those that remain.
CHANGES_BASE = ("pissa", "olora")
# Those of peft that aren't supported, and the reason.
REFUSED_ADAPTERS = {
    "corda": "it needs statistics of the layers' inputs, which aren't collected here; pissa starts from the weights alone",
    "loftq": "its adapters correct the error of 4-bit weights, and results are merged into the base without quantization",
    "lora_ga": "it needs the gradients of all base weights, for which memory would have to suffice as in full fine-tuning",
}


class Lora(Model):
    """Low-rank adapters (Hu et al., 2021), by peft. The result contains merged weights, and the adapter in `adapter/`."""

    rank: PositiveInt = 16
    """Rank of an adapter's two matrices."""
    alpha: PositiveFloat = 32
    """Scale of an adapter's output, which is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's inputs."""
    target_modules: Regex | Annotated[tuple[ModuleName, ...], Field(min_length=1)] = "all-linear"
    """Layers with an adapter: a list of suffixes of their names, or a regular expression that matches full names. `all-linear`
    is all linear layers except the output head, routers, and those in Mamba's mixers whose adapters fused kernels would ignore;
    and the experts of mixture models that peft supports."""
    rslora: bool = False
    """Scales by alpha / √rank instead (rsLoRA, Kalajdzievski, 2023), so that high ranks learn as fast as low ones."""
    dora: bool = False
    """Trains magnitude and direction of weight columns separately (DoRA, Liu et al., 2024): slower, better at low ranks."""
    # Keys at their default are left out of specs: results made before the keys existed stay current.
    init_lora_weights: (
        Annotated[str, Field(pattern=r"^(gaussian|orthogonal|eva|olora|pissa|pissa_niter_[1-9]\d?)$")] | Literal[True]
    ) = True
    """Initial values, by their names in peft: `true` (Kaiming and zeros), `gaussian`, `orthogonal`; `eva`, the main directions
    of the layers' inputs (Paischer et al., 2024); or those of the base weights, `pissa` (Meng et al., 2024; `pissa_niter_16`
    is its fast approximation) and `olora` (Büyükakyüz, 2024). The last two require `merge: true` and no `quantization`;
    `adapter/` then has twice the rank, so that it fits the base."""
    loraplus_lr_ratio: PositiveFloat | None = None
    """LoRA+ (Hayou et al., 2024): the learning rate of an adapter's second matrix, B, relative to `learning_rate`, such as
    16."""
    modules_to_save: tuple[ModuleName, ...] = ()
    """Modules that are fully trained in addition to the adapters, by suffixes of their names, such as `[embed_tokens, lm_head]`
    for new tokens. If embedding and output head share weights, one name covers both."""
    merge: bool = True
    """Writes weights with the adapter merged. `false` writes only the adapter and the tokenizer, for serving adapters; later
    stages compute with the same weights in both cases."""

    @property
    def changes_base(self) -> bool:
        """Whether the initial adapters take the place of a part of the base weights."""
        return self.init_lora_weights is not True and self.init_lora_weights.startswith(CHANGES_BASE)

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _supported(cls, name: Any) -> Any:
        if isinstance(name, str) and name in REFUSED_ADAPTERS:
            raise ValueError(f"{name!r} isn't supported: {REFUSED_ADAPTERS[name]}")
        return name

    @model_validator(mode="after")
    def _writes_weights(self) -> Self:
        if self.changes_base and not self.merge:
            raise ValueError(
                f"init_lora_weights: {self.init_lora_weights} changes the base weights, so that adapters alone would be "
                "rounded differently than merged ones; it needs merge: true"
            )
        if self.init_lora_weights == "orthogonal" and self.rank % 2:
            raise ValueError(f"init_lora_weights: orthogonal needs an even rank, found {self.rank}")
        return self


class Quantization(Model):
    """4-bit base weights for QLoRA (Dettmers et al., 2023). Requires a GPU and `lora`."""

    type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type."""
    double: bool = True
    """Quantizes the quantization constants, too (double quantization)."""


def _kind_of_lora(lora: Any) -> str:
    return "continued" if isinstance(lora, str) else "Lora"


LoraOrContinued = Annotated[
    Annotated[Lora, Tag("Lora")] | Annotated[Literal["continued"], Tag("continued")], Discriminator(_kind_of_lora)
]
