"""Counted FLOPs equal those that torch counts in the same passes, and pairs equal those of the mask."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.config.lora import Lora
from snaketune.engine.model.flops import Attention, FlopCount, count_flops
from snaketune.engine.model.parameters import train_only
from snaketune.engine.packing.segments import layout, mask
from snaketune.models.lora import add_lora
from tests.models.conftest import VOCABULARY, tiny_model

TOKENS = 24
# Two experts of eight, fused in one tensor, or beside shared ones and a dense first layer.
EXPERTS = {
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v2": {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "head_dim": 8,
                    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 4},
}  # fmt: skip


def counted_by_torch(model: torch.nn.Module) -> int:
    """Return torch's count for one sequence, forward and backward. It includes masked pairs."""
    model.train()
    ids = torch.randint(2, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def counted_here(count: FlopCount, model: torch.nn.Module) -> int:
    """Return the same by `FlopCount`: all pairs, and no vectors (norms, biases), which take no matmul."""
    vectors = sum((6 if p.requires_grad else 4) * p.numel() for p in model.parameters() if p.dim() == 1)
    attention = 3 * sum(number * kind.per_pair for kind, number in count.layers) * TOKENS**2
    attention -= 2 * sum(number * kind.per_pair for kind, number in count.forward_layers) * TOKENS**2
    return (count.per_token - vectors) * TOKENS + attention


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt2", *EXPERTS])
def test_full_training_costs_what_torch_counts(family, tied):
    settings = {"attn_implementation": "eager", "tie_word_embeddings": tied}
    if family in EXPERTS:
        config = AutoConfig.for_model(
            family, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1,
            bos_token_id=None, **settings, **EXPERTS[family],
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    else:
        model = tiny_model(family, **settings)
    count = count_flops(model)
    assert count.experts == ((2, 8) if family in EXPERTS else None)
    assert count.per_parameter == 6
    assert counted_here(count, model) == pytest.approx(counted_by_torch(model), rel=1e-3 if family in EXPERTS else 1e-9)
    plain = sum(p.numel() for p in model.parameters())
    assert count.parameters == plain
    if family not in ("gpt2", *EXPERTS):
        assert count.trained == plain - (0 if tied else VOCABULARY * 32)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_cost_two_thirds_and_adapters_all(tied):
    base = tiny_model("llama", attn_implementation="eager", tie_word_embeddings=tied)
    plain = count_flops(base)
    model = add_lora(base, Lora(rank=2))
    # Gradient checkpointing makes the first layer's inputs require gradients; without it they don't.
    model.enable_input_require_grads()
    count = count_flops(model)
    assert (count.frozen, count.per_parameter) == (plain.trained, 4)
    assert count.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted_here(count, model) == pytest.approx(counted_by_torch(model), rel=1e-9)


def test_layers_below_all_that_is_trained_have_no_backward_pass():
    model = tiny_model("llama", attn_implementation="eager", num_hidden_layers=4)
    train_only(model, r"(model\.layers\.3\..*proj|lm_head)\.weight")
    count = count_flops(model)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert (count.forward_only, count.forward_layers) == (3 * layer, ((count.layers[0][0], 3),))
    assert str(count).startswith("2 x ")
    by_torch, below = counted_by_torch(model), set(model.model.layers[:3].parameters())
    vectors = sum((2 if p in below else 4) * p.numel() for p in model.parameters() if p.dim() == 1)
    attention = (3 * 4 - 2 * 3) * count.layers[0][0].per_pair * TOKENS**2
    # The inputs of the first trained matrices need no gradient either, which isn't subtracted.
    assert by_torch <= (count.per_token - vectors) * TOKENS + attention <= 1.1 * by_torch
    # With the embedding, everything has one.
    model = tiny_model("llama")
    train_only(model, r"model\.(embed_tokens|layers\.1)\..*")
    assert count_flops(model).forward_only == 0


def test_four_bit_weights_count_by_their_unpacked_size():
    class Params4bit(torch.nn.Parameter):
        """Pack weights as bitsandbytes does: two per byte, in one column."""

    whole = tiny_model("llama").requires_grad_(False)
    packed = tiny_model("llama").requires_grad_(False)
    for layer in packed.model.layers:
        weight = layer.mlp.up_proj.weight
        bytes_ = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
        layer.mlp.up_proj.weight = Params4bit(bytes_, requires_grad=False)
    assert count_flops(packed) == count_flops(whole)


@pytest.mark.parametrize("seen", [{}, {"window": 5}, {"chunk": 4}, {"window": 100}])
def test_pairs_equal_those_of_the_mask(seen):
    kind = Attention(heads=4, sizes=(8, 8), **seen)
    placed = layout([[13, 9], [15, 6, 4], [4, 9, 20]], [[0, 0], [0, 7, 7], [0, 2, 0]], row_lengths=[24, 40, 33])
    visible_TT = mask(placed) & (placed.document_of >= 0)[:, None]
    query_T1, key_1T = placed.positions[:, None], placed.positions[None]
    if kind.window:
        visible_TT &= query_T1 - key_1T < kind.window
    if kind.chunk:
        visible_TT &= query_T1 // kind.chunk == key_1T // kind.chunk
    prefixes_D, lengths_D = placed.prefix_lengths[placed.documents], placed.lengths[placed.documents]
    assert kind.pairs(prefixes_D, lengths_D) == visible_TT.sum()


def test_windows_and_chunks_count_in_the_layers_that_have_them():
    model = tiny_model(
        "gemma3_text", num_hidden_layers=4, head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    model.config.sliding_window = 6
    count = count_flops(model)
    windowed, full = (Attention(heads=4, sizes=(8, 8), window=window) for window in (6, None))
    assert dict(count.layers) == {windowed: 3, full: 1}
    one = np.array([0]), np.array([10])
    pairs = 3 * (21 + 4 * 6) + 55
    assert count.batch(*one) == count.per_token * 10 + 12 * 4 * 8 * pairs
    model.config.use_sliding_window, model.config.layer_types = False, None
    assert dict(count_flops(model).layers) == {full: 4}


def test_tokens_that_are_not_projected_are_subtracted():
    count = count_flops(tiny_model("llama", tie_word_embeddings=False))
    assert count.computed(10**9, tokens=50, projected=20) == 10**9 - 30 * 6 * VOCABULARY * 32


def test_layers_of_different_kinds_are_counted_separately():
    """Gemma 4: full attention layers have wider heads."""
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, sliding_window=16, vocab_size=VOCABULARY)
    with torch.device("meta"):
        count = count_flops(AutoModelForCausalLM.from_config(config))
    kinds = {kind.window: (number, kind.sizes) for kind, number in count.layers}
    wide, narrow = config.per_layer_config[5].head_dim, config.per_layer_config[0].head_dim
    assert wide > narrow
    assert kinds == {16: (5, (narrow, narrow)), None: (1, (wide, wide))}
