"""Linear layers by oneDNN, with factors in bfloat16 and in float32: their results, their gradients, and where they are used."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from snaketune.models.batches import collate
from snaketune.models.cpu_products import ROWS, cpu_products
from snaketune.models.logprobs import summed_losses, token_losses
from snaketune.models.selftest import self_test
from tests.models.conftest import CPU, VOCABULARY, tiny_model
from tests.models.made_trees import tree_rows

from .test_attention import packed_rows

DTYPES = [torch.bfloat16, torch.float32]
# Sums in another order may be rounded to the neighbouring number.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(ROWS, 8), (2, 51, 8), (1, 129, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_products_of_rounded_factors(shape, bias, dtype):
    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).float()

    torch.manual_seed(0)
    layer, input = torch.nn.Linear(8, 6, bias=bias), torch.randn(shape, requires_grad=True)
    with cpu_products(dtype):
        output = layer(input)
        grad = torch.randn_like(output)
        output.backward(grad)
    rows, weight, grads = (rounded(one.detach()).flatten(0, -2) for one in (input, layer.weight, grad))
    expected = [rounded(rows @ weight.t()), rounded(grads @ weight), rounded(grads.t() @ rows)]
    if bias:
        expected[0] += layer.bias.detach()
        torch.testing.assert_close(layer.bias.grad, grad.flatten(0, -2).sum(0))
    found = [output.flatten(0, -2), input.grad.flatten(0, -2), layer.weight.grad]
    assert all(one.dtype == torch.float32 for one in found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=TOLERANCE[dtype], atol=1e-6)


def test_other_layers_are_as_without():
    layer, few, many = torch.nn.Linear(8, 6), torch.randn(ROWS - 1, 8), torch.randn(ROWS, 8)
    exact = layer(few), layer(many)
    with cpu_products(torch.bfloat16):
        assert torch.equal(layer(few), exact[0]) and not torch.equal(layer(many), exact[1])
        with cpu_products(torch.float32):
            torch.testing.assert_close(layer(many), exact[1], rtol=1e-6, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(many).dtype == torch.bfloat16
        assert layer.double()(many.double()).dtype == torch.float64
    layer.float()
    assert torch.equal(layer(many), exact[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_layer_saves_no_input_and_its_result_may_be_changed_in_place(dtype):
    layer, input = torch.nn.Linear(8, 6).requires_grad_(False), torch.randn(ROWS, 8, requires_grad=True)
    saved = []
    with cpu_products(dtype), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layer(input).mul_(2).sum().backward()
    assert [tuple(tensor.shape) for tensor in saved if tensor is not None] == [(6, 8)]
    assert input.grad.abs().sum() > 0 and layer.weight.grad is None


def test_in_float32_the_input_is_saved_without_a_copy():
    layer, input = torch.nn.Linear(8, 6), torch.randn(2, ROWS, 8)
    saved = []
    with (
        cpu_products(torch.float32),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        layer(input)
    assert input.data_ptr() in [tensor.data_ptr() for tensor in saved]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_run_again_in_the_backward_pass_are_the_same(dtype):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    input, gradients = torch.randn(100, 8), []
    for again in (False, True):
        layer.zero_grad()
        with cpu_products(dtype):
            output = checkpoint(layer, input, use_reentrant=False) if again else layer(input)
            output.square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("rows", [packed_rows(), tree_rows(VOCABULARY, 0)], ids=["documents", "trees"])
@pytest.mark.parametrize("losses", [summed_losses, token_losses])
def test_losses_and_gradients_are_as_close_to_float32_as_those_of_autocast(rows, losses):
    model = tiny_model("llama")
    self_test(model, [], CPU, training=True)
    batch = collate(rows, "sdpa")
    assert len(batch["sources"]) % ROWS

    def loss(products: torch.dtype | None = None, autocast: bool = False) -> torch.Tensor:
        model.zero_grad()
        with (
            cpu_products(products) if products else nullcontext(),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            value = losses(model, batch)
            (value * torch.linspace(-1, 1, value.numel()).reshape(value.shape)).sum().backward()
        return torch.cat([value.detach().flatten(), *(p.grad.flatten() for p in model.parameters())])

    exact = loss()
    torch.testing.assert_close(loss(products=torch.float32), exact, rtol=1e-4, atol=1e-5)
    of_products, of_autocast = (loss(products=torch.bfloat16) - exact).norm(), (loss(autocast=True) - exact).norm()
    assert 0 < of_products < 1.2 * of_autocast < 0.1 * exact.norm()
    with torch.no_grad(), cpu_products(torch.bfloat16):
        evaluated = losses(model, batch)
    torch.testing.assert_close(evaluated.flatten(), exact[: evaluated.numel()], rtol=0.01, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_compilation_serves_every_number_of_tokens(dtype):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    compiled = torch.compile(layer, dynamic=True)
    for tokens in (100, 2 * ROWS, 3 * ROWS, 177, 250):
        input = torch.randn(tokens, 8)
        with cpu_products(dtype):
            expected, output = layer(input), compiled(input)
            output.sum().backward()
        torch.testing.assert_close(output, expected, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_linear_is_torchs_own_afterwards():
    before = F.linear
    with pytest.raises(ValueError), cpu_products(torch.bfloat16):
        assert F.linear is not before
        raise ValueError
    assert F.linear is before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_others_are(dtype):
    # So that reference log-probabilities that are kept by row are those of a whole pass.
    layer, rows = torch.nn.Linear(96, 200), torch.randn(1024, 96)
    with torch.no_grad(), cpu_products(dtype):
        together = layer(rows)
        assert all(torch.equal(layer(rows[:count]), together[:count]) for count in (ROWS, ROWS + 1, 300, 777))
