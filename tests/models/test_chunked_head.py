"""The chunked head gives the losses and gradients of the whole head, and never has all logits in memory."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from benchmarks.families.examine import CPU, DOCUMENTS, PAIRS, Rows
from benchmarks.families.tiny import VOCABULARY, tiny_config, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from snaketune.config.lora import Lora
from snaketune.engine.model import fused_cross_entropy
from snaketune.engine.model.attention import use_own_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.forward import logits_at, packed_inputs
from snaketune.engine.model.logprobs import summed_losses, token_losses
from snaketune.engine.model.selftest import self_test
from snaketune.models.lora import add_lora

from .conftest import gradients

ROWS = Rows((*DOCUMENTS, *PAIRS))
# Heads: plain linear (tied or not), with scaling, with scaling and a soft cap, with a bias.
HEADS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.25},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "phi": {},
    "gpt2": {},
    "opt": {},
    "mixtral": {},
    "llama4_text": {},
}
PRODUCTS = {"llama", "qwen2", "gpt2", "opt", "mixtral", "llama4_text"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of seven rows; the last one is smaller."""
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_LOGITS", {"cpu": 7 * VOCABULARY, "other": 0})
    monkeypatch.setattr(fused_cross_entropy, "SAVED_LOGITS", 7 * VOCABULARY)
    monkeypatch.setattr(fused_cross_entropy, "MIN_CHUNK_ROWS", 1)


class MostLogits(TorchDispatchMode):
    """Records the number of rows of the largest tensor of logits that any operation returns."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            # The transposed weight isn't a tensor of logits.
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.shape[-1:] == (VOCABULARY,)
                and tensor.shape[-2:] != (48, VOCABULARY)
            ):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return made


def all_at_once(model, batch):
    logits_NV = logits_at(model, packed_inputs(batch), batch["sources"])[0][batch["source_rows"]]
    return F.cross_entropy(logits_NV.float(), batch["targets"], reduction="none")


def with_chunked_head(family, **settings):
    model = tiny_model(tiny_config(family, **settings))
    self_test(model, [ROWS], CPU, training=True)
    return model


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", HEADS)
def test_losses_and_gradients_equal_those_without_chunks(family):
    model, batch = with_chunked_head(family, **HEADS[family]), collate(ROWS, "sdpa")
    assert model.head_is_linear == (family in PRODUCTS)
    expected_N = all_at_once(model, batch)
    torch.testing.assert_close(token_losses(model, batch), expected_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed_losses(model, batch), expected_N.sum())
    # A weighted sum, as in DPO; and a mean, as in SFT.
    weights_N = torch.linspace(-1, 2, len(expected_N))
    expected = gradients(model, (expected_N * weights_N).sum())
    assert_close(gradients(model, (token_losses(model, batch) * weights_N).sum()), expected)
    expected = gradients(model, all_at_once(model, batch).mean())
    assert_close(gradients(model, summed_losses(model, batch) / len(weights_N)), expected)


def test_generation_of_a_padded_batch_is_unchanged():
    # Learned positions: generation passes them only if the forward's signature has `position_ids`.
    model, ids_2L = tiny_model(tiny_config("gpt2")), torch.randint(3, VOCABULARY, (2, 12))
    mask_2L = torch.ones_like(ids_2L)
    mask_2L[0, :7] = 0
    how = {"attention_mask": mask_2L, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before, signature = model.generate(ids_2L, **how), inspect.signature(model.forward)
    self_test(model, [ROWS], CPU, training=False)
    use_own_attention(model)
    assert hasattr(model, "original_forward")
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids_2L, **how), before)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_no_operation_has_logits_of_more_than_one_chunk(family):
    model, batch = with_chunked_head(family, hidden_size=48, intermediate_size=80), collate(ROWS, "sdpa")
    for losses in (token_losses, summed_losses):
        with MostLogits() as seen:
            losses(model, batch).sum().backward()
        assert 0 < seen.rows <= 7
    with MostLogits() as seen:
        all_at_once(model, batch).sum().backward()
    assert seen.rows == len(batch["targets"])


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ("q_proj",)},
        {"target_modules": ("lm_head", "q_proj")},
        {"target_modules": ("q_proj",), "modules_to_save": ("lm_head",)},
        {"target_modules": ("lm_head",), "dora": True},
    ],
)
def test_adapters_on_the_head_are_applied(lora):
    model, batch = with_chunked_head("llama", tie_word_embeddings=False), collate(ROWS, "sdpa")
    adapted = add_lora(model, Lora(rank=2, **lora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
            elif parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    expected = all_at_once(adapted, batch).sum()
    torch.testing.assert_close(summed_losses(adapted, batch), expected)
    actual, wanted = (
        gradients(adapted, summed_losses(adapted, batch)),
        gradients(adapted, all_at_once(adapted, batch).sum()),
    )
    assert all("lora" in name or "modules_to_save" in name for name in actual)
    assert_close(actual, wanted)


def test_a_head_in_modules_to_save_runs_in_chunks():
    model, batch = with_chunked_head("llama", hidden_size=48, intermediate_size=80), collate(ROWS, "sdpa")
    adapted = add_lora(model, Lora(rank=2, modules_to_save=("lm_head",)))
    with MostLogits() as seen:
        summed_losses(adapted, batch).backward()
    assert 0 < seen.rows <= 7


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_bfloat16_autocast_rounds_no_more_than_without_chunks(family):
    model, batch = with_chunked_head(family, **HEADS[family]), collate(ROWS, "sdpa")
    exact = gradients(model, all_at_once(model, batch).sum())
    with torch.autocast("cpu", torch.bfloat16):
        actual, whole = (
            gradients(model, loss) for loss in (summed_losses(model, batch), all_at_once(model, batch).sum())
        )
        assert summed_losses(model, batch).dtype == token_losses(model, batch).dtype == torch.float32
    for name, gradient in exact.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (actual[name] - gradient).abs().max() / scale < 1.5 * (
            whole[name] - gradient
        ).abs().max() / scale + 1e-2, name


def test_gradients_of_likely_tokens_are_not_lost_in_bfloat16(monkeypatch):
    """Where p is nearly 1, p - 1 is smaller than the rounding of p."""
    torch.manual_seed(0)
    weight_VH, targets_N = (torch.randn(512, 64) / 8).bfloat16().float(), torch.randint(0, 512, (600,))
    likely_NH = weight_VH[targets_N] / weight_VH[targets_N].norm(dim=1, keepdim=True) ** 2
    hidden_NH = (torch.randn(600, 64) + 14 * likely_NH).bfloat16().float()

    def gradients(losses_of, autocast: bool) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden_NH, weight_VH)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses_N = losses_of(*leaves)
        losses_N.backward(torch.linspace(-1, 1, 600))
        return [leaf.grad for leaf in leaves]

    def plainly(hidden_NH, weight_VH):
        return F.cross_entropy(F.linear(hidden_NH, weight_VH).float(), targets_N, reduction="none")

    def in_chunks(passes):
        return lambda *leaves: fused_cross_entropy.TokenLosses.apply(
            *leaves, torch.arange(600), targets_N, True, passes
        )

    exact, rounded = gradients(plainly, False), gradients(plainly, True)
    for free, passes in (
        (fused_cross_entropy.SAVED_LOGITS, fused_cross_entropy.EAGER),
        (0, fused_cross_entropy.EAGER),
        (0, fused_cross_entropy.fused_passes()),
    ):
        monkeypatch.setattr(fused_cross_entropy, "SAVED_LOGITS", free)
        monkeypatch.setitem(fused_cross_entropy.CHUNK_LOGITS, "cpu", 128 * 512)
        monkeypatch.setitem(fused_cross_entropy.CHUNK_LOGITS, "fused", 128 * 512)
        for actual, theirs, right in zip(gradients(in_chunks(passes), True), rounded, exact, strict=True):
            assert (actual - right).norm() < 1.5 * (theirs - right).norm() < 0.05 * right.norm()


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model, batch = with_chunked_head("llama"), collate(ROWS, "sdpa")
    other = copy.deepcopy(model)
    before = summed_losses(model, batch).item()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert summed_losses(model, batch).item() == before
    assert abs(summed_losses(other, batch).item() - before) > 1e-3


def test_the_forward_still_returns_logits_without_supervised():
    model = tiny_model(tiny_config("llama"))
    ids_1T = torch.full((1, 4), 9)
    expected = model(input_ids=ids_1T).logits
    self_test(model, [ROWS], CPU, training=True)
    use_own_attention(model)
    assert torch.equal(model(input_ids=ids_1T).logits, expected)
    assert torch.equal(model.generate(ids_1T, max_new_tokens=3, do_sample=False)[:, :4], ids_1T)


@pytest.mark.slow
def test_under_ddp_and_fsdp_gradients_equal_those_without_chunks():
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.wrapped_heads"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(": equal") == 12
