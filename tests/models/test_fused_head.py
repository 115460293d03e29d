"""Compiled passes over logits give the losses and gradients of eager ones, and move few bytes."""

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model
from torch._inductor import metrics

from snaketune.engine.model import fused_cross_entropy
from snaketune.engine.model.batches import collate
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.model.selftest import self_test
from tests.models.conftest import CPU, VOCABULARY
from tests.models.made_trees import tree_rows

from .test_attention import packed_rows


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    fused_cross_entropy.fused_passes.cache_clear()
    yield
    torch._dynamo.reset()
    fused_cross_entropy.fused_passes.cache_clear()


DOCUMENTS, TREES = packed_rows(), tree_rows(VOCABULARY, 0)


@pytest.mark.parametrize(
    ("rows", "losses"),
    [
        pytest.param(DOCUMENTS, summed_losses, id="documents, summed"),
        pytest.param(TREES, token_losses, id="trees, by token"),
        pytest.param(DOCUMENTS, token_losses, id="documents, by token", marks=pytest.mark.slow),
        pytest.param(TREES, summed_losses, id="trees, summed", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_eager_passes(rows, losses, monkeypatch):
    """Several chunks of 16 rows; the last one is smaller. In 16 bits they are at least as exact."""
    monkeypatch.setattr(fused_cross_entropy, "MIN_CHUNK_ROWS", 16)
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_LOGITS", dict.fromkeys(("cpu", "other", "fused"), 0))
    model = tiny_model(tiny_config("llama"))
    self_test(model, [], CPU, training=True)
    batch = collate(rows, "sdpa")

    def loss(fused: bool, half: bool) -> torch.Tensor:
        model.zero_grad()
        model.fused_head = fused
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            value = losses(model, batch)
        (value * torch.linspace(-1, 1, value.numel()).reshape(value.shape)).sum().backward()
        return torch.cat([value.detach().flatten(), *(p.grad.flatten() for p in model.parameters())])

    exact = loss(fused=False, half=False)
    assert (loss(fused=True, half=False) - exact).abs().max() <= 1e-5 * exact.abs().max()
    eager, fused = ((loss(fused, half=True) - exact).norm() for fused in (False, True))
    assert fused < 1.2 * eager < 0.1 * exact.norm()


def test_one_compilation_serves_every_number_of_rows():
    passes, weight_VH = fused_cross_entropy.fused_passes(), torch.randn(64, 8)
    torch._dynamo.utils.counters.clear()
    for rows in (5, 9, 30, 17):
        logits_CV = torch.randn(rows, 8) @ weight_VH.t()
        passes.loss_and_gradient(logits_CV, torch.zeros(rows, 1, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def bytes_per_logit(name: str, *per_row: torch.Tensor) -> float:
    """Return the bytes per 16-bit logit that a pass reads and writes, as the compiler counts them."""
    logits_CV = torch.randn(256, 32000).bfloat16()
    metrics.reset()
    getattr(fused_cross_entropy.fused_passes(), name)(logits_CV, *per_row)
    return metrics.num_bytes_accessed / logits_CV.numel()


def test_a_logit_costs_few_bytes_of_memory(monkeypatch):
    """A matmul writes 2 bytes per logit, and a matmul of gradients reads 2."""
    # The compiler counts only if it logs its counts.
    monkeypatch.setattr(torch._inductor.compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)
    target_C1, float_C1 = torch.zeros(256, 1, dtype=torch.int64), torch.zeros(256, 1)
    with torch._inductor.config.patch(force_disable_caches=True):
        summed = bytes_per_logit("loss_and_gradient", target_C1)
        statistics = bytes_per_logit("statistics")
        exponentials = bytes_per_logit("exponentials", float_C1, target_C1, float_C1)
    assert (summed, statistics, exponentials) == pytest.approx((6, 2, 4), abs=0.1)
    # With a loss per token, logits are recomputed in the backward pass.
    assert 2 + summed + 2 * 2 <= 16
    assert 2 + statistics + 2 + exponentials + 2 * 2 <= 16
