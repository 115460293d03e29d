"""Generation uses the same settings for every model, whatever its own generation_config; several responses to a prompt share
its pass, and each is what it would be alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from snaketune.errors import SnaketuneError
from snaketune.models.small_model import random_model, small_config
from snaketune.sampling.generation_check import GenerationMode, choose_generation_mode
from snaketune.sampling.responses import batches
from tests.models.conftest import CPU, tiny_model

from .generated import Chat, engine_of, several, texts

PROMPTS = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9, 5, 1, 9, 2)]


def written(settings: dict) -> list[tuple[str, int]]:
    model = tiny_model("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return texts(model, PROMPTS[:3], batch_size=2)


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
    alone = texts(model, PROMPTS, batch_size=1)
    assert len({text for text, _ in alone}) > 1
    uncached = texts(model, PROMPTS, mode=GenerationMode(False, False))
    assert alone == texts(model, PROMPTS, batch_size=2) == texts(model, PROMPTS) == uncached
    assert alone[1] == alone[4]


def test_a_response_ends_at_a_stop_token_or_the_length_limit():
    prompts = [np.arange(4, 4 + n, dtype=np.int32) for n in (3, 9)]
    ((longest,), _) = several(tiny_model("llama"), prompts, chat=Chat(2))
    assert len(longest.tokens) == len(longest.text.split()) == 12 and longest.ended == "length"
    # One of its generated tokens becomes the stop token.
    stop = int(longest.text.split()[5])
    ((stopped,), _) = several(tiny_model("llama"), prompts, chat=Chat(stop))
    position = longest.text.split().index(str(stop))
    # The stop token is counted; a real tokenizer doesn't decode it.
    assert stopped.tokens == longest.tokens[: position + 1] and stopped.ended == "stop"


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "mixtral", "lfm2", "qwen3_next", "mamba2"])
def test_responses_that_share_a_prompts_pass_equal_those_that_compute_it(family):
    model = random_model(small_config(AutoConfig.for_model(family))).eval()
    mode = choose_generation_mode(model, Chat(), CPU)
    # A purely recurrent model takes its cache under another name.
    assert mode.cached and mode.shared == (family != "mamba2")
    how = {"responses": 5, "temperature": 1.0, "chat": Chat(3)}
    shared = several(model, PROMPTS, mode=mode, **how)
    plain = several(model, PROMPTS, mode=replace(mode, shared=False), **how)
    assert [[r.tokens for r in row] for row in shared] == [[r.tokens for r in row] for row in plain]
    assert len({tuple(response.tokens) for row in shared for response in row}) > 15
    for row, expected in zip(shared, plain, strict=True):
        assert [r.logp for r in row] == pytest.approx([r.logp for r in expected], abs=1e-3)


def test_the_log_probability_is_that_of_a_plain_forward():
    model = tiny_model("llama")
    rows = several(model, PROMPTS, responses=3, temperature=2.0, top_p=0.9, repetition_penalty=1.3, stop=["42"])
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for response in row:
            ids = torch.tensor([prompt.tolist() + response.tokens])
            with torch.no_grad():
                logps_LV = model(ids).logits[0].double().log_softmax(-1)
            at = range(len(prompt) - 1, ids.shape[1] - 1)
            expected = sum(logps_LV[i, ids[0, i + 1]].item() for i in at)
            assert response.logp == pytest.approx(expected, abs=1e-4)


def test_an_index_has_the_same_response_whatever_the_number_of_responses():
    model = tiny_model("llama")
    eight = several(model, PROMPTS, responses=8, batch_size=16, temperature=1.0)
    for count, batch_size in ((1, 99), (3, 2), (8, 5)):
        fewer = several(model, PROMPTS, responses=count, batch_size=batch_size, temperature=1.0)
        assert [[r.tokens for r in row] for row in fewer] == [[r.tokens for r in row[:count]] for row in eight]
    assert len({tuple(r.tokens) for r in eight[0]}) == 8


def test_a_batch_computes_each_prompt_once():
    """With 8 responses of 12 tokens to a prompt of 60: 59 tokens, then 8 x 12; the last token isn't computed again."""
    model, computed = tiny_model("llama"), []
    forward = model.forward

    def counting(input_ids=None, **inputs):
        computed.append(input_ids.numel())
        return forward(input_ids=input_ids, **inputs)

    model.forward = counting
    prompt = np.arange(4, 64, dtype=np.int32)
    several(model, [prompt], responses=8, temperature=1.0, chat=Chat(96))
    assert sum(computed) == 59 + 8 * 12


def test_batches_follow_from_prompts_and_number_alone():
    generator = np.random.default_rng(0)
    prompts = [generator.integers(4, 90, generator.integers(1, 40)).astype(np.int32) for _ in range(50)]

    def digests(prompts, size):
        return [[request.digest for request in batch] for batch in batches(prompts, 4, size)]

    assert digests(prompts, 16) == digests(prompts[::-1] + prompts[:9], 16)
    assert {len(batch) for batch in digests(prompts, 16)} == {16, 8}
    # Fewer than one prompt's: still in batches, of its responses.
    assert [len(batch) for batch in digests(prompts[:2], 3)] == [3, 1, 3, 1]


def test_logits_that_are_not_finite_end_generation():
    model = tiny_model("llama")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(SnaketuneError, match="aren't finite"):
        texts(model, PROMPTS)


def test_a_batch_that_runs_out_of_memory_says_what_to_lower_and_leaves_finished_ones():
    model, forward = tiny_model("llama"), tiny_model("llama").forward

    def limited(input_ids=None, **inputs):
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(input_ids=input_ids, **inputs)

    model.forward = limited
    finished = engine_of(model).generate([*batches(PROMPTS[:2], 1, 2), *batches(PROMPTS[2:], 1, 3)])
    assert len(next(finished)) == 2
    with pytest.raises(SnaketuneError, match=r"a batch of 3 responses \(CUDA .*lower generation.batch_size .*are kept"):
        next(finished)


def test_the_engine_says_what_affects_a_response():
    engine = engine_of(tiny_model("llama"))
    assert engine.identity()["device"] == ["cpu", "torch.float32", "torch.float32"]
    assert engine.about()["name"] == "transformers" and engine.about()["shared"]
