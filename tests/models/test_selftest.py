"""The self-test accepts right kernels and refuses those with leaks between documents."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.families.tiny import tiny_config as family_config
from benchmarks.families.tiny import tiny_model as family_model
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.engine.model import kernels, selftest
from snaketune.engine.model.attention import Unpackable, use_own_attention, use_segment_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.router_choices import RouterChoices
from snaketune.engine.model.selftest import allow_also, check_kernel, self_test
from snaketune.engine.model.selftest_rows import synthetic_rows
from snaketune.engine.packing.segments import layout
from snaketune.errors import SnaketuneError

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


def test_of_a_long_row_chunks_are_compared_from_its_begin_to_its_end(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "CHUNK", 2)
    monkeypatch.setattr(selftest, "CHUNKS", 3)
    compared = []
    original = selftest.packed_logits

    def packed_logits(model, batch, positions_N, before_pass):
        compared.append(positions_N.tolist())
        return original(model, batch, positions_N, before_pass)

    monkeypatch.setattr(selftest, "packed_logits", packed_logits)
    [row] = packed_rows()[:1]
    tokens = int(row["segment_lengths"].sum())
    share, _ = selftest._difference_from_separate(tiny_model("llama"), [row], CPU)
    assert share < 1e-5 and len(compared) == 3 and compared[0][0] == 0 and tokens - 1 in compared[-1]
    assert f"comparing 6 of the {tokens} tokens of a row" in capsys.readouterr().out


sdpa = kernels.KERNELS["sdpa"]


def without_prefixes(query, key, value, segments, options):
    lengths = segments.layout.lengths.tolist()
    alone = layout([lengths], [[0] * len(lengths)], row_lengths=[segments.layout.tokens])
    return sdpa(query, key, value, replace(segments, layout=alone, keys_U=None), options)


@pytest.mark.parametrize("real", [packed_rows()[:1], []])
def test_a_kernel_that_ignores_segments_is_refused(monkeypatch, real):
    def plain_causal(query, key, value, segments, options):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(kernels.KERNELS, "sdpa", plain_causal)
    with pytest.raises(Unpackable, match="llama doesn't support packed rows: packed logits of synthetic"):
        run(tiny_model("llama"), real)


def test_the_limit_of_16_bits_grows_with_the_rounding_of_the_model_and_still_refuses_a_leak(monkeypatch, capsys):
    """As if rounding were large: so it is under 4-bit weights of 7B, and in deep models."""
    monkeypatch.setitem(selftest.TOLERANCE, torch.bfloat16, 1e-6)
    compute = replace(CPU, dtype=torch.bfloat16, kernel="sdpa")
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    use_segment_attention(model)
    tested = check_kernel(model, [], compute, training=True)
    assert "which is this model's own rounding" in capsys.readouterr().out
    assert 1e-6 < tested.share < 0.05
    assert (
        tested.about()["self_test"] == "packed = separate within 3 times the model's own rounding in 90% of the tokens"
    )

    monkeypatch.setitem(kernels.KERNELS, "sdpa", without_prefixes)
    with pytest.raises(Unpackable, match="synthetic pairs with a shared prompt"):
        check_kernel(model, [], compute, training=True)


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
    monkeypatch.setitem(kernels.KERNELS, "sdpa", without_prefixes)
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


def keep_input(inputs, module, arguments):
    inputs.append(arguments[0])


@pytest.mark.parametrize(("kernel", "layer"), [("sdpa", 3), (SEPARATE, 0)])
def test_a_near_tie_of_a_router_is_no_error(kernel, layer):
    """Rounding decides which of two equally good experts a token gets; here for one token after another of a synthetic row."""
    config = family_config("mixtral")
    (rows,) = synthetic_rows(config, prefixes=False)
    ids = torch.from_numpy(rows[0]["input_ids"][:7].astype("int64"))[None]
    for token in range(7):
        model = family_model(config)
        gate, inputs = model.model.layers[layer].mlp.gate, []
        with gate.register_forward_pre_hook(partial(keep_input, inputs)), torch.no_grad():
            model(ids, use_cache=False)
        hidden_H = inputs[0].reshape(-1, 32)[token]
        torch.manual_seed(0)
        across_H = torch.randn(32)
        across_H -= across_H @ hidden_H / hidden_H.square().sum() * hidden_H
        with torch.no_grad():
            # The second and third score of this token are equal but for rounding, and larger than the fourth.
            gate.weight[0], gate.weight[1] = 2 * hidden_H / hidden_H.norm(), hidden_H / hidden_H.norm()
            gate.weight[2], gate.weight[3] = gate.weight[1] + across_H, -hidden_H
        assert check_kernel(model, [], replace(CPU, kernel=kernel), training=True).share < 1e-4


def test_a_choice_that_rounding_does_not_explain_is_not_repeated():
    choices, scores = RouterChoices(2, tolerance=1e-3), torch.tensor([[0.5, 0.5, -1.0], [0.5, 0.4, -1.0]])
    tokens_1L = torch.arange(2)[None]
    choices.begin(tokens_1L)
    with choices:
        torch.topk(scores, 1)
    choices.repeating = True
    choices.begin(tokens_1L)
    with choices:
        values, indices = torch.topk(torch.tensor([[0.5, 0.5001, -1.0], [0.4, 0.5, -1.0]]), 1)
    assert indices.flatten().tolist() == [0, 1] and choices.ties == 1
    assert values.flatten().tolist() == [0.5, 0.5]


def test_logits_that_are_not_finite_are_refused():
    damaged = tiny_model("llama")
    with torch.no_grad():
        damaged.model.layers[0].mlp.up_proj.weight[2, 3] = torch.nan
    with pytest.raises(SnaketuneError, match=r"logits of this llama aren't finite in float32, .* undamaged checkpoint"):
        self_test(damaged, [], CPU, training=True)


def test_an_overflow_names_the_data_type_and_what_to_set():
    model = tiny_model("llama").to(torch.float16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(6e4)
        model.model.layers[1].mlp.up_proj.weight.fill_(6e4)
    with pytest.raises(SnaketuneError, match=r"aren't finite in float16, .* set training\.precision: float32"):
        self_test(model, [], replace(CPU, dtype=torch.float16), training=False)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_rows_that_fail_leave_the_model_as_it_passed_with_others(monkeypatch, capsys, family):
    model = tiny_model("llama") if family == "llama" else family_model(family_config(family))
    model.eval()
    plain = Rows(packed_rows()[:1])
    plain.has_prefixes = bool(plain[0]["prefix_lengths"].any())
    check_kernel(model, [plain], CPU, training=False)
    batch = collate(plain, "sdpa")
    with torch.no_grad():
        before = token_losses(model, batch)

    def fails(model, rows, compute):
        # As where rounding in 16 bits is measured.
        use_own_attention(model)
        raise Unpackable("too far apart")

    monkeypatch.setattr(selftest, "_difference_from_separate", fails)
    allow_also(model, Rows(packed_rows()), CPU)
    assert "too far apart" in capsys.readouterr().out
    assert ("sdpa", True) not in model.allowed_packed or plain.has_prefixes
    with torch.no_grad():
        assert torch.equal(token_losses(model, batch), before)
