"""Responses of small models, for the tests of sampling."""

import numpy as np

from snaketune.config.generation import Decoding
from snaketune.sampling.generation_check import MODES, GenerationMode
from snaketune.sampling.responses import Request, Response, batches
from snaketune.sampling.transformers_engine import TransformersEngine
from tests.models.conftest import CPU


class Chat:
    """The part of a tokenizer that generation needs; texts are token ids."""

    pad_id = 0

    def __init__(self, *stop_ids: int):
        self.stop_ids = stop_ids or (1,)

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


def engine_of(model, chat: Chat | None = None, mode: GenerationMode = MODES[0], **decoding) -> TransformersEngine:
    settings = Decoding(**({"max_new_tokens": 12} | decoding))
    return TransformersEngine(model=model, chat=chat or Chat(), compute=CPU, mode=mode, decoding=settings)


def several(model, prompts: list[np.ndarray], responses: int = 1, batch_size: int = 99, **how) -> list[list[Response]]:
    """The responses to each prompt. Args: how: as for `engine_of`."""
    found: dict[bytes, Response] = {}
    for finished in engine_of(model, **how).generate(batches(prompts, responses, batch_size)):
        found |= finished
    return [[found[Request(prompt, index).digest] for index in range(responses)] for prompt in prompts]


def texts(model, prompts: list[np.ndarray], **how) -> list[tuple[str, int]]:
    """The text of the response to each prompt, and the number of its tokens."""
    return [(response.text, len(response.tokens)) for (response,) in several(model, prompts, **how)]
