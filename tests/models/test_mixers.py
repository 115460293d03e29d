"""Mixers with a state on packed rows by their own kernels, of which the CPU has stand-ins, or else by document."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmarks.alone import losses_alone
from benchmarks.families.examine import DOCUMENTS, PAIRS, Rows
from benchmarks.families.tiny import tiny_config, tiny_model
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from snaketune.engine.model import mixers
from snaketune.engine.model.batches import collate
from snaketune.engine.model.compiling import compile_layers
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.mixers import boundary_arguments
from snaketune.engine.model.selftest import check_kernel, self_test

from .conftest import CPU

# Modules of families, with the functions that packages replace: the dimension of tokens in their tensors, and the argument of
# boundaries that the package has.
CONV = {"causal_conv1d_fn": (2, "seq_idx")}
KERNELS = {
    "lfm2": (modeling_lfm2, CONV),
    "bamba": (modeling_bamba, CONV | {"mamba2_chunk_scan": (1, "seq_idx")}),
    "qwen3_next": (modeling_qwen3_next, CONV | {"torch_chunk_gated_delta_rule": (1, "cu_seqlens")}),
    "kimi_linear": (modeling_kimi_linear, CONV | {"chunk_kimi_delta_attention": (1, "cu_seqlens")}),
}

SLOW = pytest.mark.slow


@pytest.fixture
def on_this_device(monkeypatch):
    """Offer mixers their own kernels on a CPU too."""
    monkeypatch.setattr(mixers, "KERNEL_DEVICES", ("cpu",))


@pytest.fixture
def installed(monkeypatch, on_this_device):
    """Replace functions of families by stand-ins for the packages' kernels, which restart at each boundary that they get;
    return how often each got boundaries. `ignoring`: the names of those that take boundaries and ignore them, or do so in the
    `backward` pass only."""
    counted: dict[str, int] = {}

    def install(family: str, ignoring: tuple[str, ...] = (), backward: bool = False) -> dict[str, int]:
        module, functions = KERNELS[family]
        for name, how in functions.items():
            stand_in = partial(restarting, getattr(module, name), name, *how, counted)
            made = stand_in(name in ignoring)
            if backward and name in ignoring:
                made = with_backward_of(stand_in(True), stand_in(False))
            monkeypatch.setattr(module, name, made)
        # The fused kernel of Mamba 2, for trainings: without it, its parts run.
        monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", lambda *_, **__: None, raising=False)
        return counted

    return install


def restarting(reference, name: str, dimension: int, argument: str, counted: dict[str, int], ignoring: bool):
    """Return `reference` with an argument of boundaries, `seq_idx` or `cu_seqlens`, at which it begins anew."""

    def apply(*tensors, seq_idx=None, cu_seqlens=None, **options):
        given = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}[argument]
        if given is None or ignoring:
            return reference(*tensors, **options)
        cuts = given.tolist()
        if argument == "seq_idx":
            assert given.dtype == torch.int32 and given.shape == (1, tensors[0].shape[dimension])
            cuts = [0, *(given[0].diff().nonzero()[:, 0] + 1).tolist(), given.shape[1]]
        counted[name] = counted.get(name, 0) + 1
        outputs = []
        for start, stop in pairwise(cuts):
            # Weights have no dimension of tokens, and stay whole.
            own = [part(tensor, dimension, start, stop, cuts[-1]) for tensor in tensors]
            named = {key: part(value, dimension, start, stop, cuts[-1]) for key, value in options.items()}
            outputs.append(reference(*own, **named))
        if isinstance(outputs[0], tuple):
            return torch.cat([output[0] for output in outputs], dimension), None
        return torch.cat(outputs, dimension)

    return apply


def with_backward_of(one, other):
    """Return a function with the values of `other` and the gradients of `one`."""

    def apply(*arguments, **options):
        wrong, right = one(*arguments, **options), other(*arguments, **options)
        if isinstance(right, tuple):
            return wrong[0] + (right[0] - wrong[0]).detach(), *right[1:]
        return wrong + (right - wrong).detach()

    return apply


def part(value, dimension: int, start: int, stop: int, tokens: int):
    has_tokens = isinstance(value, torch.Tensor) and value.dim() > dimension and value.shape[dimension] == tokens
    return value.narrow(dimension, start, stop - start) if has_tokens else value


def documents() -> Rows:
    rows = Rows(DOCUMENTS)
    rows.has_prefixes = False
    return rows


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        *(("lfm2", True), ("bamba", False), ("qwen3_next", False), ("kimi_linear", True)),
        *(pytest.param(*case, marks=SLOW) for case in (("lfm2", False), ("bamba", True))),
        *(pytest.param(*case, marks=SLOW) for case in (("qwen3_next", True), ("kimi_linear", False))),
    ],
)
def test_mixers_run_on_packed_rows_by_their_own_kernels(installed, family, checkpointing):
    counted = installed(family)
    model, rows = tiny_model(tiny_config(family)).train(), documents()
    tested = self_test(model, [rows], CPU, training=True)
    assert (tested.path, tested.about()["mixers"]) == ("packed", "own kernels")
    # Real layers of the families hand the boundaries to each of their kernels.
    assert set(counted) == set(KERNELS[family][1])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, alone = collate(rows, "sdpa"), tiny_model(tiny_config(family)).train()
    losses, expected = token_losses(model, batch), losses_alone(alone, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    before = dict(counted)
    losses.sum().backward()
    assert (counted != before) == checkpointing
    expected.sum().backward()
    actual = gradients(model)
    for name, gradient in gradients(alone).items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("family", "ignoring"),
    [
        ("lfm2", "causal_conv1d_fn"),
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        pytest.param("qwen3_next", "causal_conv1d_fn", marks=SLOW),
    ],
)
def test_kernels_that_ignore_boundaries_are_found_and_mixers_run_by_document(installed, capsys, family, ignoring):
    installed(family, (ignoring,))
    model, rows = tiny_model(tiny_config(family)), documents()
    tested = self_test(model, [rows], CPU, training=True)
    assert (tested.path, tested.about()["mixers"]) == ("hybrid", "by document")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{family} doesn't support packed rows: packed logits of synthetic documents differ")
    assert said[0].endswith("Trying its mixers by document")
    assert said[1].endswith("(kernel sdpa, torch.float32, mixers by document)")
    batch = collate(rows, "sdpa")
    expected = losses_alone(tiny_model(tiny_config(family)), batch)
    torch.testing.assert_close(token_losses(model, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "ignoring"),
    [("lfm2", "causal_conv1d_fn"), pytest.param("qwen3_next", "torch_chunk_gated_delta_rule", marks=SLOW)],
)
def test_kernels_whose_gradients_ignore_boundaries_are_found_before_a_training(installed, capsys, family, ignoring):
    installed(family, (ignoring,), backward=True)
    assert self_test(tiny_model(tiny_config(family)), [documents()], CPU, training=False).mixers == "own kernels"
    assert self_test(tiny_model(tiny_config(family)), [documents()], CPU, training=True).mixers == "by document"
    assert "the gradient of one document reaches another" in capsys.readouterr().out


@pytest.mark.parametrize(
    "family",
    [
        *("lfm2", "qwen3_next"),
        *(pytest.param(one, marks=SLOW) for one in ("bamba", "mamba2", "kimi_linear", "olmo_hybrid", "nemotron_h")),
    ],
)
def test_without_the_packages_transformers_says_so_and_mixers_run_by_document(on_this_device, capsys, family):
    tested = self_test(tiny_model(tiny_config(family)), [documents()], CPU, training=True)
    assert tested.about()["mixers"] == "by document"
    assert "can't keep packed sequences apart without" in capsys.readouterr().out


def test_with_shared_prompts_mixers_run_by_document(installed):
    counted = installed("lfm2")
    model, pairs, rows = tiny_model(tiny_config("lfm2")), Rows(PAIRS), documents()
    assert check_kernel(model, [pairs], CPU, training=True).about()["mixers"] == "by document"
    assert not counted
    # A batch with a shared prompt does so even if the mixers run by their own kernels.
    assert check_kernel(model, [rows], CPU, training=True).about()["mixers"] == "own kernels"
    counted.clear()
    batch = collate(pairs, "sdpa")
    expected = losses_alone(tiny_model(tiny_config("lfm2")), batch)
    torch.testing.assert_close(token_losses(model, batch), expected, rtol=1e-4, atol=1e-4)
    assert not counted


def test_compiled_layers_run_mixers_by_their_own_kernels(installed):
    counted = installed("lfm2")
    model, rows = tiny_model(tiny_config("lfm2")).train(), documents()
    self_test(model, [rows], CPU, training=True)
    batch = collate(rows, "sdpa")
    expected = token_losses(model, batch)
    expected.sum().backward()
    compared = gradients(model)
    model.zero_grad()
    counted.clear()
    torch._dynamo.reset()
    compile_layers(model, CPU, checkpointing=False)
    losses = token_losses(model, batch)
    losses.sum().backward()
    torch._dynamo.reset()
    assert counted
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, compared[name], rtol=1e-4, atol=1e-4, msg=name)


class RecurrentMixer(torch.nn.Module):
    """A recurrence that begins anew where `seq_idx` changes, if it `reads` that."""

    def __init__(self, size: int, reads: bool):
        super().__init__()
        self.decay, self.reads = torch.nn.Parameter(torch.rand(size)), reads

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
        state, outputs = torch.zeros_like(hidden_states[:, 0]), []
        for at in range(hidden_states.shape[1]):
            if at and self.reads and seq_idx is not None:
                state = state * (seq_idx[:, at] == seq_idx[:, at - 1])[:, None]
            state = self.decay * state + hidden_states[:, at]
            outputs.append(state)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(("reads", "way"), [(True, "own kernels"), (False, "by document")])
def test_the_self_test_chooses_the_way(on_this_device, reads, way):
    def made():
        model = tiny_model(tiny_config("lfm2"))
        torch.manual_seed(1)
        for layer in model.model.layers:
            if hasattr(layer, "conv"):
                layer.conv = Called(RecurrentMixer(32, reads))
        return model

    model, rows = made(), documents()
    assert self_test(model, [rows], CPU, training=True).about()["mixers"] == way
    batch = collate(rows, "sdpa")
    torch.testing.assert_close(token_losses(model, batch), losses_alone(made(), batch), rtol=1e-4, atol=1e-4)


class Called(torch.nn.Module):
    """Calls a mixer with the arguments that it has, of those that the layers of LFM2 give."""

    def __init__(self, inner: RecurrentMixer):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **_):
        return self.inner(hidden_states)


def test_names_of_boundaries_by_mixer():
    class Neither(torch.nn.Module):
        def forward(self, hidden_states, attention_mask=None):
            return hidden_states

    named = {
        modeling_qwen3_next.Qwen3NextGatedDeltaNet: ("seq_idx", "cu_seq_lens_q"),
        modeling_kimi_linear.KimiLinearDeltaAttention: ("seq_idx", "cu_seqlens"),
        modeling_bamba.BambaMixer: ("seq_idx", "cu_seqlens"),
        modeling_lfm2.Lfm2ShortConv: ("seq_idx", "cu_seqlens"),
        RecurrentMixer: ("seq_idx",),
        Neither: (),
    }
    assert {mixer: boundary_arguments(mixer) for mixer in named} == named


def test_boundaries_cover_every_token_of_all_rows():
    batch = collate(documents(), "sdpa")
    rows = batch["segments"].layout
    given = mixers.boundaries(rows, torch.device("cpu"))
    cuts = [0, *(np.flatnonzero(np.diff(given["seq_idx"][0])) + 1).tolist(), rows.tokens]
    assert given["cu_seqlens"].tolist() == cuts
    assert set(np.cumsum([0, *rows.lengths]).tolist()) == set(cuts)
