"""Tensors and saved activations that are traced from a config, against real models."""

from dataclasses import replace

import pytest
import torch
from benchmarks.families.tiny import tiny_config
from transformers import AutoConfig, LlamaConfig

from snaketune.config.lora import Lora, Quantization
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.engine.model.attention import use_segment_attention
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.flops import count_flops
from snaketune.engine.model.kernels import segments_for
from snaketune.engine.model.parameters import parameter_count
from snaketune.engine.packing.segments import layout
from snaketune.errors import SnaketuneError
from snaketune.models.lora import add_lora
from snaketune.models.memory import SHARED, estimate
from snaketune.models.traced_model import MicroBatch, trace_model

from .conftest import CPU, tiny_model

FAMILIES = ["llama", "gpt2", "mixtral", "gemma3", "gemma3_text", "phi3", "deepseek_v2"]
GPU = Compute(device=torch.device("cuda"), dtype=torch.bfloat16, kernel="varlen")
BATCH = MicroBatch(rows=2, row_length=64, longest=40)
LORA = Lora(rank=4, target_modules=("q_proj", "down_proj"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_family_gets_an_estimate(family, compute):
    traced = trace_model(tiny_config(family), compute, batch=BATCH)
    frozen = traced.parameters - traced.trained
    assert traced.trained > 0
    # Vision tower and projector.
    assert (frozen > 0) == (family == "gemma3")
    estimated = estimate(traced, compute, "adamw_torch")
    recomputed = estimate(traced, compute, "adamw_torch", checkpointing=True)
    assert estimated.minimum < recomputed.expected < estimated.expected
    assert estimated.minimum == 16 * traced.trained + 4 * frozen


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_traced_model_has_the_parameters_of_the_loaded_one(model, lora):
    traced = trace_model(model.config, CPU, lora=lora and replace_targets(model, lora), batch=BATCH)
    loaded = add_lora(model, replace_targets(model, lora)) if lora else model
    assert traced.parameters == parameter_count(loaded)
    assert traced.trained == sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    assert traced.flops == count_flops(loaded)


def replace_targets(model, lora: Lora) -> Lora:
    fused = model.config.model_type == "phi3"
    return lora.model_copy(update={"target_modules": ("qkv_proj", "down_proj")}) if fused else lora


def saved_by(model: torch.nn.Module, tokens: int) -> int:
    """Return the bytes that autograd saves in a forward pass of the decoder."""
    use_segment_attention(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rows_layout = layout([[tokens]], [[0]], row_lengths=[tokens])
        hidden = model.get_decoder()(
            torch.zeros(1, tokens, dtype=torch.int64),
            position_ids=torch.from_numpy(rows_layout.positions)[None],
            segments=segments_for("sdpa", rows_layout),
            use_cache=False,
        )
    assert hidden[0].requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_traced_activations_equal_those_that_autograd_saves():
    model = tiny_model("llama", num_hidden_layers=3).train()
    batch = MicroBatch(rows=1, row_length=64, longest=64)
    traced = trace_model(model.config, CPU, batch=batch)
    assert traced.activations.total == pytest.approx(saved_by(model, 64), rel=0.02)
    doubled = trace_model(model.config, CPU, batch=replace(batch, rows=2)).activations
    assert doubled.total == pytest.approx(2 * traced.activations.total, rel=0.02)
    # Inputs of three layers are 32 numbers per token; little is saved before and after them.
    assert 3 * 64 * 32 * 4 <= traced.activations.checkpointed <= 6 * 64 * 32 * 4


def test_adapters_save_fewer_activations_and_frozen_weights_have_no_gradients():
    config = tiny_model("llama").config
    full, adapted = (trace_model(config, GPU, lora=lora, batch=BATCH) for lora in (None, LORA))
    assert adapted.activations.total < full.activations.total
    estimated = estimate(adapted, GPU, "adamw_torch")
    frozen = adapted.parameters - adapted.trained
    assert (estimated.weights, estimated.gradients) == (2 * frozen + 4 * adapted.trained, 4 * adapted.trained)


def test_4_bit_weights_are_linear_layers_and_everything_else_is_in_float32():
    model = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    traced = trace_model(model.config, GPU, lora=LORA, batch=BATCH)
    # q, k, v and o; gate, up and down.
    linear = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    rest = traced.parameters - traced.trained - linear
    for double, bits in ((True, 4.126953125), (False, 4.5)):
        estimated = estimate(traced, GPU, "adamw_torch", quantization=Quantization(double=double))
        assert estimated.weights == round(linear * bits / 8 + 4 * rest + 4 * traced.trained)


def test_processes_shard_the_tensors_of_their_sharing():
    traced = trace_model(tiny_model("llama").config, GPU, batch=BATCH)
    alone = estimate(traced, GPU, "adamw_torch")
    for sharing, shared in SHARED.items():
        estimated = estimate(traced, GPU, "adamw_torch", processes=4, sharing=sharing)
        for name in ("weights", "gradients", "states"):
            assert getattr(estimated, name) == getattr(alone, name) // (4 if name in shared else 1)
    ddp = estimate(traced, GPU, "adamw_torch", processes=4)
    assert ddp.expected == alone.expected + alone.gradients


def test_gradients_of_earlier_micro_batches_add_to_activations():
    traced = trace_model(tiny_model("llama").config, CPU, batch=BATCH)
    one, several = (estimate(traced, CPU, "sgd", accumulation=n) for n in (1, 3))
    assert several.step == one.step + one.gradients


def test_paged_states_may_leave_a_gpu_but_not_a_cpu():
    traced = trace_model(tiny_model("llama").config, GPU, batch=BATCH)
    on_gpu, on_cpu = (estimate(traced, compute, "paged_adamw_32bit") for compute in (GPU, CPU))
    assert on_gpu.minimum == on_cpu.minimum - on_cpu.states
    assert {name for name in OPTIMIZERS if OPTIMIZERS[name].for_gpus} == {
        name for name in OPTIMIZERS if not OPTIMIZERS[name].refused and ("8bit" in name or "paged" in name)
    }


@pytest.mark.parametrize(
    "config",
    [
        # No family that transformers knows.
        type("OwnConfig", (LlamaConfig,), {"model_type": "own"})(),
        # Inconsistent.
        AutoConfig.for_model("llama", vocab_size=-3),
    ],
)
def test_a_config_that_cannot_be_built_gives_no_trace(config):
    assert trace_model(config, CPU, batch=BATCH) is None


def test_a_forward_that_depends_on_values_gives_the_minimum_alone(monkeypatch):
    def needs_values(*_, **__):
        raise RuntimeError("a value is needed")

    monkeypatch.setattr("snaketune.models.traced_model._trace", needs_values)
    traced = trace_model(tiny_model("llama").config, CPU, batch=BATCH)
    estimated = estimate(traced, CPU, "adamw_torch")
    assert (traced.activations, estimated.expected) == (None, None)
    assert estimated.minimum == 16 * traced.parameters


def test_adapters_that_fit_no_layer_are_refused_before_anything_is_loaded():
    with pytest.raises(SnaketuneError, match="lora"):
        trace_model(tiny_model("llama").config, CPU, lora=Lora(target_modules=("c_attn",)), batch=BATCH)


def test_tracing_draws_no_random_numbers_and_warns_of_nothing(recwarn):
    before = torch.random.get_rng_state()
    trace_model(tiny_config("gpt2"), GPU, batch=BATCH)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not [w for w in recwarn if "peft" in str(w.filename)]
