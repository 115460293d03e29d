"""Sinks on the varlen kernel: the outputs and gradients of `dense`, by a stand-in that has flash's contract."""

import inspect
from dataclasses import replace

import pytest
import torch
from benchmarks.families.examine import CPU, PAIRS, Rows
from benchmarks.families.tiny import tiny_config, tiny_model
from torch.nn.attention import varlen

from snaketune.engine.model import kernels, varlen_sinks
from snaketune.engine.model.batches import collate
from snaketune.engine.model.kernels import KERNELS, AttentionOptions, refusal, segments_for
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.selftest import check_kernel
from snaketune.engine.packing.segments import layout
from tests.cuda import standin

# Documents; a tree of completions; and padding.
ROWS = layout([[9, 14, 6], [12, 5, 8, 3]], [[0, 0, 0], [0, 7, 12, 8]], row_lengths=[32, 31])
IS_TOKEN = torch.from_numpy(ROWS.document_of >= 0)


@pytest.fixture
def in_float32(monkeypatch):
    def forward(query, key, value, segments, longest, scale, window):
        return standin.attended(query, key, value, *segments, scale, window)

    def backward(grad, inputs, out, lse, segments, longest, scale, window):
        return standin.gradients_of(grad, *inputs, out, lse, *segments, scale, window)

    def varlen_attn(query, key, value, cu_q, cu_k, *_, scale, window_size, **__):
        """Without a sink, for layers that have none; the gradient is that of `AttentionWithSinks` with a sink of -inf."""
        none = torch.full((query.shape[1],), -torch.inf)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return varlen_sinks.AttentionWithSinks.apply(query, key, value, none, cu_q, cu_k, 0, scale, window_size[0])

    kernels._gradient_error.cache_clear()
    monkeypatch.setattr(kernels, "varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen_sinks, "varlen_forward", forward)
    monkeypatch.setattr(varlen_sinks, "varlen_backward", backward)


def attended(kernel: str, window: int | None, scaling: float | None, value_size: int) -> list[torch.Tensor]:
    """Return the output of attention with sinks, and the gradients of queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(0)
    segments = segments_for(kernel, ROWS)
    shapes = (4, ROWS.tokens, 8), (2, ROWS.tokens, 8), (2, ROWS.tokens, value_size)
    inputs = [torch.randn(1, *shape, generator=generator).requires_grad_() for shape in shapes]
    sinks_H = torch.tensor([-3.0, 0.0, 1.5, 6.0]).requires_grad_()
    options = AttentionOptions(scaling=scaling, window=window, has_sinks=True, sinks_H=sinks_H)
    # Kernels differ in what padding sees.
    out = KERNELS[kernel](*inputs, segments, options)[0, IS_TOKEN]
    out.backward(torch.randn(out.shape, generator=generator))
    return [out.detach(), *(tensor.grad for tensor in (*inputs, sinks_H))]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("scaling", "value_size"), [(None, 8), (0.7, 4)])
def test_outputs_and_gradients_equal_those_of_dense(in_float32, window, scaling, value_size):
    """With grouped heads, prefixes, and sinks from negligible to dominant."""
    expected, actual = (attended(kernel, window, scaling, value_size) for kernel in ("dense", "varlen"))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all(grad.abs().max() > 1e-2 for grad in actual[1:])


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "granitemoe_swa"])
def test_losses_and_gradients_of_families_equal_those_of_dense(in_float32, family):
    config, rows = tiny_config(family, sliding_window=5), Rows(PAIRS)
    models = tiny_model(config), tiny_model(config)
    losses = []
    for model, kernel in zip(models, ("dense", "varlen")):
        check_kernel(model, [rows], replace(CPU, kernel=kernel), training=True)
        losses.append(token_losses(model, collate(rows, kernel)))
        losses[-1].sum().backward()
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    of_sinks = 0
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)
        of_sinks += name.endswith("sinks") and bool(one.grad.abs().max() > 1e-3)
    assert of_sinks


def test_kernels_with_sinks():
    options = AttentionOptions(has_sinks=True)
    assert [refusal(kernel, 64, options) for kernel in ("varlen", "sdpa", "dense")] == [""] * 3
    for kernel in ("flash_attention_2", "flash_attention_4"):
        assert refusal(kernel, 64, options).startswith("its attention has sinks")


def test_the_operators_of_torch_have_the_arguments_that_are_passed_by_position():
    forward, backward = (
        " ".join(argument.name for argument in operator.default._schema.arguments)
        for operator in (torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward)
    )
    assert forward.startswith("query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size")
    assert backward.startswith(
        "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale"
    )
    assert backward.endswith("scale window_size")
    assert "is_causal = window_size == (-1, 0)" in inspect.getsource(varlen.varlen_attn)
