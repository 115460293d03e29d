"""Evaluation asks every model in the same way, whatever settings of its own it brings."""

import numpy as np
import pytest

from snaketune.evaluation.generation import generate
from tests.models.conftest import CPU, tiny_model


class Chat:
    """As much of a tokenizer as generation needs: texts are token numbers."""

    pad_id, stop_ids = 0, (1,)

    def decode(self, ids):
        return " ".join(map(str, ids))


def written(settings: dict) -> list[tuple[str, int]]:
    model = tiny_model("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9, 5)]
    return generate(model, Chat(), prompts, max_new_tokens=12, batch_size=2, compute=CPU)


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
def test_a_base_with_settings_of_its_own_is_asked_like_any_other(settings):
    plain = written({})
    assert len(set(" ".join(text for text, _ in plain).split())) > 1
    assert written(settings) == plain
