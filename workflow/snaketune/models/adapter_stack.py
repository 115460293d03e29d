"""Loading of a model from results: a complete model, or a chain of adapters on their base layers.

The loaded weights equal, bit by bit, those of runs that merged their adapters (`lora.merge: false` saves them alone).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.config.base_models import Pretrained, Scratch
from snaketune.config.lora import Quantization
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import (
    DeviceMap,
    load_base,
    load_pretrained,
    read_config,
    reload_model,
    scratch_config,
    stored_dtype,
)
from snaketune.tokenization.chat import ChatTokenizer

ADAPTER = "adapter"


def is_adapter_only(result: Artifact) -> bool:
    """Return True if the result holds adapters without base weights; its manifest then records the `base_dtype`."""
    return "base_dtype" in result.manifest


def check_trained_on(result: Artifact, base_layers: Sequence[Artifact]) -> None:
    """Raise SnaketuneError unless the adapters of `result` were trained on `base_layers`, in this order."""
    inputs = result.provenance["inputs"]
    trained_on = [*inputs.get("model", ()), *inputs.get("base_layers", ())]
    if result.provenance["spec"].get("continued"):
        # The continued run's adapter is part of this one, so that run isn't a base layer.
        trained_on = trained_on[1:]
    if trained_on != [layer.content for layer in base_layers]:
        paths = ", ".join(str(layer.manifest_path) for layer in base_layers) or "none"
        raise SnaketuneError(
            f"{result.manifest_path}: its adapters were trained on other results than the given base layers ({paths}); give "
            f"model and base_layers from the top down, or rebuild it with: {rebuild_command(result.manifest_path)}"
        )


@dataclass(frozen=True, kw_only=True)
class AdapterStack:
    """A model and its base layers: results from the top down, of which all but the last hold adapters alone; the base
    model, None where the last result is complete; and the folder of the tokenizer that all of them share."""

    results: tuple[Artifact, ...] = ()
    base: Pretrained | Scratch | None = None
    tokenizer: Path
    trust_remote_code: bool = False

    def __post_init__(self):
        complete = [not is_adapter_only(result) for result in self.results]
        if any(complete[:-1]) or any(complete[-1:]) == (self.base is not None):
            raise SnaketuneError(
                "model, base_layers: expected results that hold adapters alone, followed by either a complete model or the "
                "spec's base"
            )
        for number, result in enumerate(self.results):
            if not complete[number]:
                check_trained_on(result, self.results[number + 1 :])

    @property
    def named_base(self) -> Pretrained | None:
        """The folder or Hub repository that this model is, if there are no results; else None."""
        return self.base if not self.results and isinstance(self.base, Pretrained) else None

    @property
    def weights(self) -> Pretrained | None:
        """The folder or Hub repository with the weights that adapters are applied to; None for a model from scratch."""
        if self.base is None:
            return self._pretrained(self.results[-1])
        return self.base if isinstance(self.base, Pretrained) else None

    def _pretrained(self, result: Artifact) -> Pretrained:
        return Pretrained(path=str(result.folder), trust_remote_code=self.trust_remote_code)

    def config(self) -> PretrainedConfig | None:
        """Return the model's config, read without its weights; None for a model from scratch."""
        if not self.results:
            return read_config(self.base)
        return read_config(self._pretrained(self.results[0]))

    def new_config(self) -> PretrainedConfig | None:
        """Return the config of a model from scratch; None for any other."""
        if self.results or not isinstance(self.base, Scratch):
            return None
        return scratch_config(self.base, ChatTokenizer.load(self.tokenizer))

    def load(
        self,
        weights_dtype: torch.dtype,
        quantization: Quantization | None = None,
        device_map: DeviceMap | None = None,
    ) -> PreTrainedModel:
        """Load the model, with an embedding for every token of its tokenizer. SnaketuneError: as `load_pretrained`, or adapters
        don't fit. Args: device_map: of a complete model."""
        how = {"weights_dtype": weights_dtype, "quantization": quantization}
        if not self.results:
            return load_base(self.base, ChatTokenizer.load(self.tokenizer), device_map=device_map, **how)
        if not is_adapter_only(self.results[0]):
            return load_pretrained(self._pretrained(self.results[0]), device_map=device_map, **how)
        # Adapters draw random initial values, which are then replaced; forked, so that later random numbers are those of
        # merged weights.
        with torch.random.fork_rng([]):
            merged = self._merged()
        return reload_model(merged, **how)

    def _merged(self) -> PreTrainedModel:
        """Return the top result as its run would have merged it."""
        from snaketune.engine.model.adapters import cast_parameters, load_adapter, merge

        top, saved = self.results[0], stored_dtype(self.config())
        base = replace(self, results=self.results[1:]).load(getattr(torch, top.manifest["base_dtype"]))
        model = merge(load_adapter(base, top.folder / ADAPTER), saved)
        cast_parameters(model, saved)
        return model
