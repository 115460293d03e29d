"""Generation uses the same settings for every model, whatever its own generation_config."""

import numpy as np
import pytest

from snaketune.config.evaluations import Decoding
from snaketune.evaluation.generation import generate
from tests.models.conftest import CPU, tiny_model


class Chat:
    """The part of a tokenizer that generation needs; texts are token ids."""

    pad_id, stop_ids = 0, (1,)

    def decode(self, ids):
        return " ".join(map(str, ids))


def written(settings: dict) -> list[tuple[str, int]]:
    model = tiny_model("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9, 5)]
    return generate(model, Chat(), prompts, decoding=Decoding(max_new_tokens=12), batch_size=2, compute=CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(40))},
        {"do_sample": True, "temperature": 3.0},
        {"num_beams": 4},
        {"forced_eos_token_id": 7},
        {"min_new_tokens": 12, "max_length": 10},
    ],
)
def test_a_base_with_its_own_generation_settings_generates_greedily(settings):
    plain = written({})
    assert len(set(" ".join(text for text, _ in plain).split())) > 1
    assert written(settings) == plain


def test_responses_are_in_the_order_of_their_prompts_for_any_batch_size():
    model = tiny_model("llama")
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9, 5, 1, 9, 2)]

    def texts(batch_size: int, cached: bool = True) -> list[tuple[str, int]]:
        return generate(
            model,
            Chat(),
            prompts,
            decoding=Decoding(max_new_tokens=6),
            batch_size=batch_size,
            compute=CPU,
            cached=cached,
        )

    alone = texts(1)
    assert len({text for text, _ in alone}) > 1
    assert alone == texts(2) == texts(4) == texts(99) == texts(1, cached=False)
    assert alone[1] == alone[4]


def test_a_response_ends_at_a_stop_token_or_the_length_limit():
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9)]
    (longest, tokens), _ = written_by(prompts, stops=())
    assert tokens == len(longest.split()) == 12
    # One of its generated tokens becomes the stop token.
    stop = int(longest.split()[5])
    (stopped, tokens), _ = written_by(prompts, stops=(stop,))
    position = longest.split().index(str(stop))
    # The stop token is counted; a real tokenizer doesn't decode it.
    assert stopped.split() == longest.split()[: position + 1]
    assert tokens == position + 1


def written_by(prompts: list[np.ndarray], stops: tuple[int, ...]) -> list[tuple[str, int]]:
    chat = Chat()
    chat.stop_ids = stops or (2,)
    return generate(tiny_model("llama"), chat, prompts, decoding=Decoding(max_new_tokens=12), batch_size=2, compute=CPU)
