"""A model as it lies in results: complete, or as adapters upon what lies beneath them.

    results[0]      adapters alone (`lora.merge: false`)
    results[1]      adapters alone, or a complete model; and so on down
    base            what isn't a result: a folder or the Hub's, or a new model

Put together it is, to the bit, what it would be if each of the runs had merged its adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.config.training_runs import Pretrained, Quantization, Scratch
from snaketune.errors import SnaketuneError
from snaketune.models.load_model import (
    as_loaded,
    load_base,
    load_folder,
    read_config,
    read_folder_config,
    scratch_config,
    stored_dtype,
)
from snaketune.tokenization.chat import ChatTokenizer

ADAPTER = "adapter"


def holds_adapter_alone(result: Artifact) -> bool:
    """Whether its weights lie elsewhere, and it is what is added to them, in the data type that its manifest tells."""
    return "base_dtype" in result.manifest


def check_trained_on(result: Artifact, below: Sequence[Artifact]) -> None:
    """Raise SnaketuneError unless a result's adapters were trained on the results `below`, in their order."""
    inputs = result.manifest["inputs"]
    trained_on = [*inputs.get("model", ()), *inputs.get("base_layers", ())]
    if result.manifest["spec"].get("continued"):
        # The adapter of the run that it continues is in its own.
        trained_on = trained_on[1:]
    if trained_on != [one.content for one in below]:
        given = ", ".join(str(one.manifest_path) for one in below) or "none"
        raise SnaketuneError(
            f"{result.manifest_path}: its adapters were trained on other results than those given below it ({given}); give "
            f"model and base_layers from the uppermost down, or make it again with: {rebuild_command(result.manifest_path)}"
        )


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A model that can be loaded.

    Attributes:
        results: from the uppermost down.
        base: what lies beneath them; None where the lowest of them is complete.
        tokenizer: the folder of the one tokenizer that all of them have.
    """

    results: tuple[Artifact, ...] = ()
    base: Pretrained | Scratch | None = None
    tokenizer: Path
    trust_remote_code: bool = False

    def __post_init__(self):
        complete = [not holds_adapter_alone(result) for result in self.results]
        if any(complete[:-1]) or any(complete[-1:]) == (self.base is not None):
            raise SnaketuneError(
                "model, base_layers: expected results that hold adapters alone and, as the last one, a complete model; or a "
                "base of the spec in its place"
            )
        for number, result in enumerate(self.results):
            if not complete[number]:
                check_trained_on(result, self.results[number + 1 :])

    @property
    def named_base(self) -> Pretrained | None:
        """What it is as a whole, where that is no result and can be named."""
        return self.base if not self.results and isinstance(self.base, Pretrained) else None

    def config(self) -> PretrainedConfig | None:
        """Of what `load` gives, read without its weights; None for a model from scratch."""
        if not self.results:
            return read_config(self.base)
        return read_folder_config(self.results[0].folder, trust_remote_code=self.trust_remote_code)

    def new_config(self) -> PretrainedConfig | None:
        """Of what `load` makes from scratch, if it does."""
        if self.results or not isinstance(self.base, Scratch):
            return None
        return scratch_config(self.base, ChatTokenizer.load(self.tokenizer))

    def load(self, weights_dtype: torch.dtype, quantization: Quantization | None = None) -> PreTrainedModel:
        """The model, with room for every token of its tokenizer.

        Raises:
            SnaketuneError: as `load_folder`, or adapters that don't fit what lies beneath them.
        """
        if not self.results:
            chat = ChatTokenizer.load(self.tokenizer)
            return load_base(self.base, chat, weights_dtype=weights_dtype, quantization=quantization)
        if holds_adapter_alone(self.results[0]):
            # What is drawn on the way is replaced; what is drawn after it is as with merged weights.
            with torch.random.fork_rng([]):
                merged = self._merged()
            return as_loaded(merged, weights_dtype=weights_dtype, quantization=quantization)
        return load_folder(
            self.results[0].folder,
            weights_dtype=weights_dtype,
            quantization=quantization,
            trust_remote_code=self.trust_remote_code,
        )

    def _merged(self) -> PreTrainedModel:
        """The uppermost result as its run would have merged it."""
        from snaketune.models.adapters import merge, put_adapter, round_weights

        top, saved = self.results[0], stored_dtype(self.config())
        base = Stack(
            results=self.results[1:],
            base=self.base,
            tokenizer=self.tokenizer,
            trust_remote_code=self.trust_remote_code,
        ).load(getattr(torch, top.manifest["base_dtype"]))
        model = merge(put_adapter(base, top.folder / ADAPTER), saved)
        round_weights(model, saved)
        return model
