"""Tiny models of the four architectures, made through their own config classes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.engine.model.devices import Compute

VOCABULARY = 97
CPU = Compute(device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa")


def tiny_model(architecture: str, **settings) -> torch.nn.Module:
    config = AutoConfig.for_model(
        architecture,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "initializer_range": 0.2,
        }
        | settings,
    )
    if hasattr(config, "sliding_window"):
        config.sliding_window = None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["llama", "qwen2", "mistral", "phi3"])
def model(request):
    return tiny_model(request.param)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
