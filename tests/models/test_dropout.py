"""A model's own dropout is off inside the context, and restored after it."""

import pytest
import torch

from snaketune.engine.model.forward import without_dropout

from .conftest import tiny_model


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon", "llama"])
def test_dropout_is_off_inside_and_back_outside(family):
    settings = {"gpt2": ("attn_pdrop", "resid_pdrop"), "opt": ("dropout",), "falcon": ("hidden_dropout",)}
    model = tiny_model(family, **dict.fromkeys(settings.get(family, ("attention_dropout",)), 0.5)).train()
    before = model.config.to_dict()
    ids = torch.arange(4, 24)[None]
    with torch.no_grad(), without_dropout(model):
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(model.train()(input_ids=ids).logits, expected)
    assert model.config.to_dict() == before
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, expected)


def test_a_router_threshold_is_not_dropout():
    """phimoe's threshold, which is used in evaluation too."""
    model = tiny_model("llama")
    model.model.layers[0].router_jitter_noise, model.model.layers[0].input_jitter_noise = 0.01, 0.02
    with without_dropout(model):
        assert model.model.layers[0].router_jitter_noise == 0.01
        assert model.model.layers[0].input_jitter_noise == 0.0
    assert model.model.layers[0].input_jitter_noise == 0.02
