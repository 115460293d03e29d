"""Generation uses batches and the cache only if they don't change logits; results equal greedy decoding by forwards."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.errors import SnaketuneError
from snaketune.sampling.generation_check import choose_generation_mode
from tests.models.conftest import CPU, tiny_model

from .generated import Chat, texts


def usual():
    return tiny_model("llama")


def recurrent():
    config = AutoConfig.for_model(
        "rwkv", vocab_size=97, hidden_size=32, num_hidden_layers=2, context_length=64, eos_token_id=1, bos_token_id=None
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def forgetful():
    """A model whose cache loses everything."""
    model = usual()
    forward = model.forward

    def forgetting(input_ids=None, past_key_values=None, use_cache=None, **_):
        return forward(input_ids=input_ids, past_key_values=None, use_cache=use_cache)

    model.forward = forgetting
    return model


def sly():
    """A model whose generation differs from its forward in every mode."""
    model = usual()
    forward = model.forward

    def differently(input_ids=None, **inputs):
        out = forward(input_ids=input_ids, **inputs)
        if set(inputs) - {"use_cache"}:
            out.logits = out.logits.roll(1, -1)
        return out

    model.forward = differently
    return model


@pytest.mark.parametrize(
    ("make", "batched", "cached", "said"),
    [
        (usual, True, True, ""),
        (recurrent, False, True, "rwkv can't generate as usual (batches, a shared cache: "),
        (forgetful, False, False, "it generates one prompt at a time, without cache"),
    ],
)
def test_a_model_uses_the_first_right_generation_mode(make, batched, cached, said, capsys):
    model = make()
    way = choose_generation_mode(model, Chat(), CPU)
    assert (way.batched, way.cached) == (batched, cached)
    assert said in capsys.readouterr().out if said else not capsys.readouterr().out
    prompts = [np.random.default_rng(n).integers(4, 97, n).astype(np.int32) for n in (3, 17, 9)]
    written = texts(model, prompts, mode=way, max_new_tokens=6)
    assert [text for text, _ in written] == [greedily(model, prompt, 6) for prompt in prompts]


@torch.no_grad()
def greedily(model, prompt: np.ndarray, tokens: int) -> str:
    ids = prompt.tolist()
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != 1):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return " ".join(map(str, ids[len(prompt) :]))


def test_a_model_without_a_right_generation_mode_is_refused():
    with pytest.raises(
        SnaketuneError, match=r"llama: logits of generation differ from those of its forward .*no cache"
    ):
        choose_generation_mode(sly(), Chat(), CPU)
