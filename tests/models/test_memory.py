"""What a model is going to hold and keep, told from its config, against models that are there."""

from dataclasses import replace

import pytest
import torch
from benchmarks.families.tiny import tiny_config
from transformers import AutoConfig, LlamaConfig

from snaketune.config.optimizers import OPTIMIZERS
from snaketune.config.training_runs import Lora, Quantization
from snaketune.errors import SnaketuneError
from snaketune.models.adapters import add_lora
from snaketune.models.attention import use_segment_attention
from snaketune.models.devices import Compute
from snaketune.models.flops import count_flops
from snaketune.models.kernels import segments_for
from snaketune.models.load_model import parameter_count
from snaketune.models.memory import SHARED, estimate
from snaketune.models.memory_trace import MicroBatch, trace_model
from snaketune.packing.segments import layout

from .conftest import CPU, tiny_model

FAMILIES = ["llama", "gpt2", "mixtral", "gemma3", "gemma3_text", "phi3", "deepseek_v2"]
GPU = Compute(device=torch.device("cuda"), dtype=torch.bfloat16, kernel="varlen")
BATCH = MicroBatch(rows=2, row_length=64, longest=40)
LORA = Lora(rank=4, target_modules=("q_proj", "down_proj"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_family_gets_an_estimate(family, compute):
    planned = trace_model(tiny_config(family), compute, batch=BATCH)
    assert planned.trained == planned.parameters > 0
    found = estimate(planned, compute, "adamw_torch", batch=BATCH)
    recomputed = estimate(planned, compute, "adamw_torch", batch=BATCH, checkpointing=True)
    assert found.minimum < recomputed.expected < found.expected
    assert found.minimum == 16 * planned.trained


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_planned_model_is_the_one_that_is_loaded(model, lora):
    planned = trace_model(model.config, CPU, lora=lora and replace_targets(model, lora), batch=BATCH)
    there = add_lora(model, replace_targets(model, lora)) if lora else model
    assert planned.parameters == parameter_count(there)
    assert planned.trained == sum(p.numel() for p in there.parameters() if p.requires_grad)
    assert planned.flops == count_flops(there)


def replace_targets(model, lora: Lora) -> Lora:
    fused = model.config.model_type == "phi3"
    return lora.model_copy(update={"target_modules": ("qkv_proj", "down_proj")}) if fused else lora


def kept_by(model: torch.nn.Module, tokens: int) -> int:
    """Bytes that autograd really keeps of a forward pass of the decoder."""
    use_segment_attention(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        placed = layout([[tokens]], [[0]], row_lengths=[tokens])
        hidden = model.get_decoder()(
            torch.zeros(1, tokens, dtype=torch.int64),
            position_ids=torch.from_numpy(placed.positions)[None],
            segments=segments_for("sdpa", placed),
            use_cache=False,
        )
    assert hidden[0].requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_what_is_kept_is_what_autograd_keeps():
    model = tiny_model("llama", num_hidden_layers=3).train()
    batch = MicroBatch(rows=1, row_length=64, longest=64)
    planned = trace_model(model.config, CPU, batch=batch)
    assert planned.activations.total == pytest.approx(kept_by(model, 64), rel=0.02)
    twice = trace_model(model.config, CPU, batch=replace(batch, rows=2)).activations
    assert twice.total == pytest.approx(2 * planned.activations.total, rel=0.02)
    # Three layers are entered with 32 numbers per token; before and after them there is little.
    assert 3 * 64 * 32 * 4 <= planned.activations.checkpointed <= 6 * 64 * 32 * 4


def test_recomputed_adapters_keep_little_and_frozen_weights_have_no_gradients():
    config = tiny_model("llama").config
    full, adapted = (trace_model(config, GPU, lora=lora, batch=BATCH) for lora in (None, LORA))
    assert adapted.activations.total < full.activations.total
    found = estimate(adapted, GPU, "adamw_torch", batch=BATCH)
    frozen = adapted.parameters - adapted.trained
    assert (found.weights, found.gradients) == (2 * frozen + 4 * adapted.trained, 4 * adapted.trained)


def test_4_bit_weights_are_linear_layers_and_everything_else_is_in_float32():
    model = tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=False)
    planned = trace_model(model.config, GPU, lora=LORA, batch=BATCH)
    # q, k, v and o; gate, up and down.
    linear = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    rest = planned.parameters - planned.trained - linear
    for double, bits in ((True, 4.126953125), (False, 4.5)):
        found = estimate(planned, GPU, "adamw_torch", quantization=Quantization(double=double))
        assert found.weights == round(linear * bits / 8 + 4 * rest + 4 * planned.trained)


def test_processes_divide_what_they_share():
    planned = trace_model(tiny_model("llama").config, GPU, batch=BATCH)
    alone = estimate(planned, GPU, "adamw_torch", batch=BATCH)
    for sharing, shared in SHARED.items():
        found = estimate(planned, GPU, "adamw_torch", batch=BATCH, processes=4, sharing=sharing)
        for name in ("weights", "gradients", "states"):
            assert getattr(found, name) == getattr(alone, name) // (4 if name in shared else 1)
    ddp = estimate(planned, GPU, "adamw_torch", batch=BATCH, processes=4)
    assert ddp.expected == alone.expected + alone.gradients


def test_gradients_of_earlier_micro_batches_are_there_while_activations_are():
    planned = trace_model(tiny_model("llama").config, CPU, batch=BATCH)
    one, several = (estimate(planned, CPU, "sgd", batch=BATCH, accumulation=n) for n in (1, 3))
    assert several.step == one.step + one.gradients


def test_pages_of_states_may_leave_a_gpu_and_no_cpu():
    planned = trace_model(tiny_model("llama").config, GPU, batch=BATCH)
    on_gpu, on_cpu = (estimate(planned, compute, "paged_adamw_32bit") for compute in (GPU, CPU))
    assert on_gpu.minimum == on_cpu.minimum - on_cpu.states
    assert {name for name in OPTIMIZERS if OPTIMIZERS[name].for_gpus} == {
        name for name in OPTIMIZERS if not OPTIMIZERS[name].refused and ("8bit" in name or "paged" in name)
    }


@pytest.mark.parametrize(
    "config",
    [
        # Of no family that transformers knows.
        type("OwnConfig", (LlamaConfig,), {"model_type": "own"})(),
        # At odds with itself.
        AutoConfig.for_model("llama", vocab_size=-3),
    ],
)
def test_of_a_config_that_cannot_be_read_nothing_is_said(config):
    assert trace_model(config, CPU, batch=BATCH) is None


def test_a_pass_that_depends_on_values_leaves_what_is_certain(monkeypatch):
    def looks(*_, **__):
        raise RuntimeError("a value is needed")

    monkeypatch.setattr("snaketune.models.memory_trace._trace", looks)
    planned = trace_model(tiny_model("llama").config, CPU, batch=BATCH)
    found = estimate(planned, CPU, "adamw_torch", batch=BATCH)
    assert (planned.activations, found.expected) == (None, None)
    assert found.minimum == 16 * planned.parameters


def test_adapters_that_fit_no_layer_are_refused_before_anything_is_loaded():
    with pytest.raises(SnaketuneError, match="lora"):
        trace_model(tiny_model("llama").config, CPU, lora=Lora(target_modules=("c_attn",)), batch=BATCH)


def test_planning_draws_nothing_and_warns_of_nothing(recwarn):
    before = torch.random.get_rng_state()
    trace_model(tiny_config("gpt2"), GPU, batch=BATCH)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not [w for w in recwarn if "peft" in str(w.filename)]
