"""A killed training resumes exactly: all weights and the sample order, on one process or on several."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from benchmarks.families import tiny as families
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from snaketune.config.held_out import Evaluate
from snaketune.config.lora import Lora
from snaketune.engine.checkpoints import (
    WEIGHTS,
    last_checkpoint,
    load_weights,
    save_weights,
)
from snaketune.engine.features import TrainingFeatures
from snaketune.engine.throughput import LogCallback
from snaketune.errors import SnaketuneError
from tests.models.conftest import tiny_model

from .pipeline_runs import CPU, Interrupted, copy_after, held_out_pack, pack, spec, stop_after, train

# Families whose names on the Hub differ from the module's: fused experts, renamed and tied heads, latent projections.
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v2": {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip
OTHERS = ("llama", "qwen3", "olmo2", "gpt2", "gpt_neox", "opt", "phi")
# Three with a state in some layers, and two whose documents run separately.
UNPACKED = ("qwen3_next", "granitemoehybrid", "lfm2", "stablelm", "bloom")


def model_of(family: str) -> torch.nn.Module:
    if family in EXPERTS:
        config = AutoConfig.for_model(
            family, vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
            **({"num_experts_per_tok": 2, "num_key_value_heads": 4} | EXPERTS[family]),
        )  # fmt: skip
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)
    return families.tiny_model(families.tiny_config(family)) if family in UNPACKED else tiny_model(family)


# Fused experts, latent projections, a head of another name, a tied one, a state, documents that run separately, a prefix tree.
EACH = {("mixtral", 0), ("deepseek_v3", 0), ("gpt_neox", 0), ("gpt2", 0), ("lfm2", 0), ("bloom", 0), ("llama", 6)}
FAMILIES = [*((family, 0) for family in (*EXPERTS, *OTHERS, *UNPACKED)), ("llama", 6), ("lfm2", 6)]


@pytest.mark.parametrize(
    ("family", "prefix"), [pytest.param(*one, marks=[] if one in EACH else pytest.mark.slow) for one in FAMILIES]
)
def test_a_resumed_training_ends_with_the_weights_of_an_undisturbed_one(family, prefix, tmp_path, monkeypatch):
    rows, made = pack(tmp_path / "pack", rows=12, prefix=prefix), spec(epochs=2)
    # Measured at each step: between the checkpoint and the kill, and again after the resume.
    measured = {"held_out": held_out_pack(tmp_path / "held", rows=3), "evaluate": Evaluate(every=1)}
    copy_after(1, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    straight, resumed = (
        train(tmp_path / name, rows, made, lambda: model_of(family), **measured) for name in ("straight", "resumed")
    )
    assert resumed.run["steps_of_this_process"] == 2
    # The result of one precision names no others.
    assert "resumed_from_numerics" not in resumed.about
    assert len(straight.run["held_out"]["points"]) == 7
    assert resumed.run["held_out"]["points"] == straight.run["held_out"]["points"]
    straight, resumed = (
        load_file(tmp_path / name / "payload.partial/model.safetensors") for name in ("straight", "resumed")
    )
    assert straight.keys() == resumed.keys()
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"lora": Lora(rank=2)}])
def test_steps_multiply_at_the_runs_precision_and_measurements_at_the_highest(tmp_path, monkeypatch, settings):
    precisions, forward = set(), torch.nn.Linear.forward

    def recorded(layer, *inputs):
        output = forward(layer, *inputs)
        precisions.add((torch.is_grad_enabled(), torch.get_float32_matmul_precision()))
        if output.requires_grad:
            output.register_hook(lambda _: precisions.add(("backward", torch.get_float32_matmul_precision())))
        return output

    monkeypatch.setattr(torch.nn.Linear, "forward", recorded)
    measured = {"held_out": held_out_pack(tmp_path / "held", rows=3), "evaluate": Evaluate(every=1)}
    compute = replace(CPU, matmul_precision="medium")
    trained = train(tmp_path / "run", pack(tmp_path / "pack", rows=12), spec(**settings), **measured, compute=compute)
    assert trained.about["matmul_precision"] == "medium"
    # Without gradients: held-out rows, and the self-test.
    assert precisions == {(True, "medium"), ("backward", "medium"), (False, "highest")}


def test_a_resumed_training_saves_and_logs_at_the_current_intervals(tmp_path, monkeypatch):
    """The Trainer's state has the intervals of the run that wrote the checkpoint."""
    rows, made = pack(tmp_path / "pack", rows=24), spec(epochs=2)
    train(tmp_path / "straight", rows, made)
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed", rows, made, every=4, log_steps=4)
    saved: list[int] = []
    on_save = TrainingFeatures.on_save

    def record(self, args, state, control, **keywords):
        on_save(self, args, state, control, **keywords)
        saved.append(state.global_step)

    monkeypatch.setattr(TrainingFeatures, "on_save", record)
    history = train(tmp_path / "resumed", rows, made, every=3, log_steps=1).run["history"]
    assert saved == [6, 9, 12]
    assert [entry["step"] for entry in history] == [1, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    straight, resumed = (
        load_file(tmp_path / name / "payload.partial/model.safetensors") for name in ("straight", "resumed")
    )
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]


@pytest.mark.parametrize("log_steps", [1, 3, 100])
def test_repeated_steps_are_counted_once(tmp_path, monkeypatch, log_steps):
    """Killed after six of nine steps, and resumed after the fourth."""
    rows, made = pack(tmp_path / "pack", rows=12), spec()
    on_step_end = LogCallback.on_step_end

    def killed(self, args, state, control, **keywords):
        on_step_end(self, args, state, control, **keywords)
        if state.global_step == 7:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(LogCallback, "on_step_end", killed)
        with pytest.raises(Interrupted):
            train(tmp_path / "resumed", rows, made, log_steps=log_steps)
    assert last_checkpoint(tmp_path / "resumed/state/checkpoints").name == "checkpoint-4"
    outcome = train(tmp_path / "resumed", rows, made, log_steps=log_steps)
    assert (outcome.counts["steps"], outcome.counts["tokens"]) == (9, 3 * outcome.counts["tokens_per_epoch"])


def test_adapters_resume(tmp_path, monkeypatch):
    rows, made = pack(tmp_path / "pack", rows=12), spec(epochs=2, lora=Lora(rank=2, dropout=0.3))
    copy_after(1, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    train(tmp_path / "straight", rows, made)
    (checkpoint,) = (tmp_path / "resumed/state/checkpoints").glob("checkpoint-*")
    # Frozen weights are the base's, and aren't in the checkpoint.
    assert all("lora_" in name for name in load_file(checkpoint / f"{WEIGHTS}.safetensors"))
    train(tmp_path / "resumed", rows, made)
    straight, resumed = (
        load_file(tmp_path / name / "payload.partial/model.safetensors") for name in ("straight", "resumed")
    )
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]


def test_a_result_of_several_precisions_records_them(tmp_path, monkeypatch, capsys):
    rows, made = pack(tmp_path / "pack", rows=12), spec(epochs=3)
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32)
    for number, dtype in enumerate(dtypes, 1):
        with monkeypatch.context() as patch:
            if number < len(dtypes):
                # Each attempt but the last gets one checkpoint further.
                stop_after(1, patch)
            ended = pytest.raises(Interrupted) if number < len(dtypes) else nullcontext()
            with ended:
                outcome = train(tmp_path / "run", rows, made, every=2, compute=replace(CPU, dtype=dtype))
    assert outcome.about["dtype"] == "float32"
    assert outcome.about["resumed_from_numerics"] == [
        {"dtype": "float32", "kernel": "sdpa"}, {"dtype": "bfloat16", "kernel": "sdpa"},
    ]  # fmt: skip
    assert capsys.readouterr().out.count("so the result mixes both") == 2


@pytest.mark.parametrize("what", ["missing", "unexpected", "another shape", "another data type"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path, what):
    saved, model = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        saved.lm_head.weight.zero_()
    if what == "missing":
        del saved.model.norm.weight
    elif what == "unexpected":
        saved.model.extra = torch.nn.Parameter(torch.ones(2))
    elif what == "another shape":
        saved.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    else:
        saved.model.norm.to(torch.bfloat16)
    save_weights(tmp_path, saved)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SnaketuneError, match=r"weights.safetensors doesn't fit the model \(model\."):
        load_weights(tmp_path, model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
