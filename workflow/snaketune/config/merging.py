"""The `merge:` section: models that are averages of other models' weights."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from snaketune.config.base import Model, PositiveFloat
from snaketune.config.publishing import TrainedModel


class Merge(Model):
    """A model whose weights are averaged from those of trained models, without training: variants of one base, or snapshots
    of one run. Evaluations and `gguf` name it `merge:NAME`."""

    models: Annotated[dict[TrainedModel, PositiveFloat], Field(min_length=2)]
    """Weight of each model, such as `{"sft:demo@0.5": 1, "sft:demo": 1}`; they are divided by their sum."""
    method: Literal["linear", "slerp"] = "linear"
    """`linear` is the weighted mean (model soups, Wortsman et al., 2022); `slerp` interpolates two models on the sphere, tensor
    by tensor, which retains their norms (Shoemake, 1985). Adapters are applied to their base first."""

    @model_validator(mode="after")
    def _two_for_slerp(self) -> Self:
        if self.method == "slerp" and len(self.models) != 2:
            raise ValueError(f"slerp interpolates between two models; found {len(self.models)}")
        return self
