"""Whether a model fits beside its cache is known from its config."""

from dataclasses import replace

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model

from snaketune.engine.model.machine import inspect_machine
from snaketune.errors import SnaketuneError
from snaketune.sampling import memory
from snaketune.sampling.memory import check_memory, memory_of
from tests.models.conftest import CPU


def bytes_in(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.is_floating_point() else 0
    return sum(map(bytes_in, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("tokens", [20, 100])
def test_the_bytes_of_weights_and_cache_are_those_of_a_forward_pass(family, tokens):
    config = tiny_config(family)
    model = tiny_model(config).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    expected = sum(bytes_in(vars(layer)) for layer in cache.layers)
    weights, cached = memory_of(config, torch.float32, torch.float32, tokens)
    assert weights == sum(parameter.nbytes for parameter in model.parameters())
    # Some caches count tokens in numbers of their own.
    assert expected > 0 and cached == pytest.approx(expected, abs=64)


def test_what_does_not_fit_is_refused_with_the_batch_that_does(monkeypatch):
    config = tiny_config("llama")
    weights, cached = memory_of(config, torch.float32, torch.float32, 1000)
    machine = inspect_machine(CPU)

    def check(memory_bytes: int, rows: int, gpus: int = 1) -> None:
        monkeypatch.setattr(memory, "inspect_machine", lambda compute: replace(machine, memory=memory_bytes))
        check_memory(config, CPU, torch.float32, rows=rows, tokens=1000, gpus=gpus)

    check(weights + 8 * cached, rows=8)
    with pytest.raises(SnaketuneError, match=r"the cache of 32 responses of up to 1000 .*generation.batch_size: 8,"):
        check(weights + 8 * cached, rows=32)
    with pytest.raises(SnaketuneError, match="use a larger GPU, or engine: vllm with more gpus"):
        check(weights, rows=1)
    check(weights + cached, rows=1)
    check((weights + cached) // 2 + 1, rows=1, gpus=2)
