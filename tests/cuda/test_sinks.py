"""Sinks on the varlen kernel in 16 bits: families stay packed, layers are one graph, and wrong gradients are refused."""

import pytest
import torch
from benchmarks.families.examine import PAIRS, Rows
from benchmarks.families.tiny import tiny_config, tiny_model

from snaketune.engine.model import kernels, varlen_sinks
from snaketune.engine.model.attention import Unpackable
from snaketune.engine.model.kernels import AttentionOptions, segments_for
from snaketune.engine.model.packing_support import with_supported_kernel
from snaketune.engine.model.selftest import check_kernel, self_test
from snaketune.engine.packing.segments import layout
from tests.cuda import standin

from .conftest import VARLEN


@pytest.fixture(autouse=True)
def first_check():
    """Forget the gradients that were compared earlier in this process."""
    kernels._gradient_error.cache_clear()
    yield
    kernels._gradient_error.cache_clear()


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "granitemoe_swa"])
def test_families_with_sinks_stay_packed_on_the_varlen_kernel(calls, family):
    # All experts: in 16 bits, routers that choose some amplify rounding in random weights.
    config = tiny_config(family, sliding_window=5, num_experts_per_tok=4)
    assert with_supported_kernel(VARLEN, config, dropout=False) == VARLEN
    tested = self_test(tiny_model(config), [Rows(PAIRS)], VARLEN, training=True)
    assert (tested.compute, tested.path) == (VARLEN, "packed")
    assert 4 in {call["window"] for call in calls}


@pytest.mark.parametrize("window", [None, 5])
def test_attention_with_sinks_is_one_graph(calls, fresh, window):
    """Forward and backward are compiled without a graph break, and equal those without compilation."""
    rows = layout([[9, 14, 6]], [[0, 0, 0]], row_lengths=[29])
    segments = segments_for("varlen", rows)

    def attended(attend, *inputs):
        trained = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        options = AttentionOptions(window=window, has_sinks=True, sinks_H=trained[-1])
        out = attend(*trained[:3], segments, options)
        out.float().square().sum().backward()
        return [out, *(tensor.grad for tensor in trained)]

    torch.manual_seed(0)
    inputs = [*(torch.randn(1, heads, 29, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)), torch.randn(4)]
    expected = attended(kernels.KERNELS["varlen"], *inputs)
    compiled = torch.compile(kernels.KERNELS["varlen"], fullgraph=True, backend="aot_eager")
    for one, other in zip(attended(compiled, *inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("wrong", ["lse", "out"])
def test_a_backward_that_reads_something_else_is_refused(calls, monkeypatch, capsys, wrong):
    """Forwards are right, so the logits show nothing."""

    def backward(grad, inputs, out, lse, segments, longest, scale, window):
        plain_out, plain_lse = standin.attended(*inputs, *segments, scale, window)
        out, lse = (out, plain_lse) if wrong == "lse" else (plain_out, lse)
        return standin.gradients_of(grad, *inputs, out, lse, *segments, scale, window)

    monkeypatch.setattr(varlen_sinks, "varlen_backward", backward)
    monkeypatch.setattr("snaketune.engine.model.selftest.usable_kernels", lambda device, dtype: ["varlen", "sdpa"])
    model = tiny_model(tiny_config("gpt_oss"))
    with pytest.raises(Unpackable, match="gradients of attention with sinks by kernel varlen are wrong by"):
        check_kernel(model, [Rows(PAIRS)], VARLEN, training=True)
    assert self_test(model, [Rows(PAIRS)], VARLEN, training=True).compute.kernel == "sdpa"
    assert capsys.readouterr().out.splitlines()[0].endswith("Trying kernel sdpa")


def test_right_gradients_are_within_rounding(calls):
    assert kernels._gradient_error(VARLEN.device, VARLEN.dtype) < 6e-3
