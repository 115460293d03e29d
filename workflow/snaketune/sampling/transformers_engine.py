"""The engine `transformers`: generation in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from snaketune.config.generation import Decoding
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.machine import is_out_of_memory
from snaketune.errors import SnaketuneError, first_line
from snaketune.progress import progress
from snaketune.sampling.decoding import generate_batch
from snaketune.sampling.generation_check import GenerationMode
from snaketune.sampling.responses import Request, Response, tokens_in
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.libraries import installed_version
from snaketune.tokenization.chat import ChatTokenizer

# Modules whose code affects responses: generation, merging of adapters, the model's own attention.
CODE = ("snaketune.sampling.decoding", "snaketune.models.adapter_stack", "snaketune.engine.model.attention")
LIBRARIES = ("torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True)
class TransformersEngine:
    """Generation by a loaded model, with its own attention, on the device of `compute`. Args: mode: one that the model was
    checked for."""

    model: PreTrainedModel
    chat: ChatTokenizer
    compute: Compute
    mode: GenerationMode
    decoding: Decoding

    def identity(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "device": [self.compute.device.type, str(self.compute.dtype), str(self.model.dtype)],
            "continuing": {"batched": self.mode.batched, "cached": self.mode.cached},
            "code": [code_digest(module) for module in CODE],
            "versions": [installed_version(name) for name in LIBRARIES],
        }

    def about(self) -> dict[str, Any]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        shared = {"batched": self.mode.batched, "cached": self.mode.cached, "shared": self.mode.shared}
        return {"name": "transformers", "version": installed_version("transformers"), "dtype": dtype} | shared

    def run(self) -> dict[str, Any]:
        return {}

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        batches = wanted if self.mode.batched else [prompt for batch in wanted for prompt in _by_prompt(batch)]
        total = sum(map(len, batches))
        yield from progress(map(self._generate, batches), "generating", "responses", total, len, tokens=tokens_in)

    def _generate(self, batch: Sequence[Request]) -> dict[bytes, Response]:
        how = {"decoding": self.decoding, "compute": self.compute}
        how |= {"cached": self.mode.cached, "shared": self.mode.shared}
        try:
            return generate_batch(self.model, self.chat, batch, **how)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise SnaketuneError(
                f"memory ran out in a batch of {len(batch)} responses ({first_line(error)}); lower generation.batch_size "
                "(batch_size of a judge) or max_new_tokens, and run again: finished responses are kept"
            ) from error


def _by_prompt(batch: Sequence[Request]) -> list[list[Request]]:
    return [list(group) for _, group in groupby(batch, key=lambda request: request.prompt.tobytes())]
