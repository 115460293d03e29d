"""The check of greedy responses: it passes on those of the engine, and fails on those of another model or of a wrong ending."""

import re
from dataclasses import replace

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model

from snaketune.config.generation import Decoding
from snaketune.diagnostics.checks import responses
from snaketune.sampling.decoding import generate_batch
from snaketune.sampling.responses import Request
from snaketune.tokenization.chat import ChatTokenizer
from tests.models.conftest import CPU
from tests.tokenization.small_tokenizers import tokenizer_artifact


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_artifact(tmp_path_factory.mktemp("tokenizer")).folder)


def made(chat: ChatTokenizer, **decoding):
    """A model, and its responses to three prompts as an evaluation stores them: generated in a batch."""
    config = tiny_config("llama")
    config.vocab_size = 2000
    torch.manual_seed(1)
    model = tiny_model(config)
    prompts = [chat.encode_prompt([{"role": "user", "content": "word " * count}]) for count in (1, 4, 9)]
    batch = [Request(prompt) for prompt in prompts]
    known = generate_batch(model, chat, batch, decoding=Decoding(max_new_tokens=8, **decoding), compute=CPU)
    stored = [
        responses.Stored(id=str(number), prompt=prompt, text=one.text, tokens=len(one.tokens))
        for number, (prompt, one) in enumerate(zip(prompts, (known[request.digest] for request in batch)))
    ]
    return model, stored


def check(model, chat, stored, cut=False):
    return responses.responses_equal_generated(model, chat, stored, torch.float32, cut=cut)


def test_responses_of_the_engine_pass_and_those_of_another_model_fail(chat):
    model, stored = made(chat)
    result = check(model, chat, stored)
    assert result.status == "passed" and re.search(r"of 3, \d+ tokens$", result.compares), result
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    result = check(model, chat, stored)
    assert result.status == "failed" and result.figure == 1.0 and result.reason.startswith("0: ")


def test_one_that_ends_elsewhere_fails_unless_texts_are_cut(chat):
    model, stored = made(chat)
    shorter = [replace(one, text="") for one in stored]
    assert check(model, chat, shorter).status == "failed"
    assert check(model, chat, shorter, cut=True).status == "passed"


def test_tokens_that_rounding_may_exchange_are_not_compared(chat):
    model, stored = made(chat)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[:1].expand_as(model.lm_head.weight))
    result = check(model, chat, stored)
    assert result.status == "not checked" and result.reason == "rounding may change the first token of each"
