"""Adapters on weights in 4 bits."""

from copy import deepcopy

import pytest
import torch

from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Lora, Quantization
from snaketune.errors import SnaketuneError
from snaketune.models import load_model
from snaketune.models.load_model import load_pretrained
from snaketune.models.lora import add_lora

from .conftest import tiny_model
from .test_adapters import IDS, learned


@pytest.fixture
def in_4_bits(tmp_path, monkeypatch):
    """Weights in real 4 bits with double quantization on the CPU; runs use them on CUDA alone."""
    monkeypatch.setattr(load_model, "_device_for_4_bits", lambda: "cpu")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
    model = tiny_model("llama", **sizes)
    model.save_pretrained(tmp_path / "base")
    return load_pretrained(
        Pretrained(path=str(tmp_path / "base")), weights_dtype=torch.float32, quantization=Quantization()
    ), model


def dequantized(model: torch.nn.Module, like: torch.nn.Module) -> torch.nn.Module:
    """Return the model with its weights dequantized to float32."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    plain = deepcopy(like)
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            assert module.weight.quant_state.nested
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.get_submodule(name).weight.data = weight.float()
    return plain


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_of_adapters_on_4_bit_weights_equal_those_on_dequantized_ones(in_4_bits, dora):
    """Also after an evaluation, in which bitsandbytes may repack the weights."""
    model, original = in_4_bits
    gradients = []
    for one in (model, dequantized(model, original)):
        with torch.no_grad():
            one.eval()(IDS)
        torch.manual_seed(0)
        adapted = learned(add_lora(one, Lora(rank=2, dora=dora, modules_to_save=("lm_head",)))).train()
        adapted(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    quantized, expected = gradients
    assert quantized.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(quantized[name], gradient, rtol=1e-3, atol=1e-3)


def test_4_bit_weights_cannot_be_modules_to_save(in_4_bits):
    with pytest.raises(SnaketuneError, match=r"modules_to_save: .*down_proj is in 4 bits"):
        add_lora(in_4_bits[0], Lora(rank=2, modules_to_save=("down_proj",)))
