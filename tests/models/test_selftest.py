"""The self-test accepts right kernels and refuses those with leaks between documents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snaketune.models import kernels
from snaketune.models.attention import Unpackable, use_segment_attention
from snaketune.models.batches import collate
from snaketune.models.cpu_attention import attention_blocks
from snaketune.models.logprobs import token_losses
from snaketune.models.selftest import check_kernel, self_test

from .conftest import CPU, tiny_model
from .test_attention import packed_rows


class Rows(list):
    """Rows with the attributes of `PackedRows`."""

    longest, fullest, has_prefixes = (20, 0), 0, True


def run(model, rows, kernel="sdpa", training=True):
    return check_kernel(model, [Rows(rows)], replace(CPU, kernel=kernel), training=training)


def test_every_kernel_of_this_device_passes(model):
    for row in packed_rows():
        for kernel in ("sdpa", "dense"):
            result = run(model, [row], kernel)
            assert result.share < 1e-5
            assert result.about() == {
                "kernel": kernel,
                "dtype": "float32",
                "self_test": "packed = separate within 1e-03",
            }


@pytest.mark.parametrize("real", [packed_rows()[:1], []])
def test_a_kernel_that_ignores_segments_is_refused(monkeypatch, real):
    def plain_causal(query, key, value, segments, options):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(kernels.KERNELS, "sdpa", plain_causal)
    with pytest.raises(Unpackable, match="llama doesn't support packed rows: packed logits of synthetic"):
        run(tiny_model("llama"), real)


def test_one_full_document_per_row_does_not_hide_a_leak(monkeypatch):
    """Best-fit-decreasing puts the longest document into a row of its own, in which no leak can show."""
    [row] = packed_rows()[:1]
    row |= {"segment_lengths": np.array([len(row["input_ids"])], np.int32), "prefix_lengths": np.array([0], np.int32)}
    monkeypatch.setitem(kernels.KERNELS, "sdpa", lambda q, k, v, segments, options: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=options.scaling, enable_gqa=True
    ).transpose(1, 2))  # fmt: skip
    with pytest.raises(Unpackable):
        run(tiny_model("llama"), [row])


def test_a_kernel_that_ignores_prefixes_is_refused_where_prompts_are_shared(monkeypatch):
    def without_prefixes(rows):
        return tuple(block for block in attention_blocks(rows) if block.causal)

    monkeypatch.setattr(kernels, "attention_blocks", without_prefixes)
    with pytest.raises(Unpackable, match="synthetic pairs with a shared prompt"):
        run(tiny_model("llama"), packed_rows()[1:])
    documents = Rows(packed_rows()[:1])
    documents.has_prefixes = False
    self_test(tiny_model("llama"), [documents], CPU, training=True)


def test_a_leak_in_training_mode_only_is_refused():
    model = tiny_model("llama")

    def leak(module, arguments, output):
        return output + output.mean(1, keepdim=True) if module.training else output

    model.model.layers[0].mlp.register_forward_hook(leak)
    assert run(model, [], training=False).share < 1e-5
    with pytest.raises(Unpackable, match="in training mode"):
        run(model, [])


def test_nan_does_not_pass(monkeypatch):
    monkeypatch.setitem(kernels.KERNELS, "sdpa", lambda q, *_: torch.full_like(q.transpose(1, 2), torch.nan))
    with pytest.raises(Unpackable):
        run(tiny_model("llama"), [])


def test_the_self_test_does_not_change_random_numbers_or_mode():
    model = tiny_model("llama").train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(model, [])
    assert model.training
    assert torch.equal(torch.rand(3), expected)


def test_no_packed_forward_without_the_self_test():
    model = tiny_model("llama")
    batch = collate(packed_rows(), "sdpa")
    use_segment_attention(model)
    with pytest.raises(RuntimeError, match="before its self-test"):
        token_losses(model, batch)
    run(model, [])
    token_losses(model, batch)
    with pytest.raises(RuntimeError, match="shared prompts by kernel dense before its self-test"):
        token_losses(model, collate(packed_rows(), "dense"))
