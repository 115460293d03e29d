"""Compiled layers: chosen for a reason, the same training as without, and nothing compiled again after the first step."""

import pytest
import torch
from benchmarks.families.tiny import tiny_config, tiny_model
from pydantic import ValidationError
from safetensors.torch import load_file
from torch._inductor.output_code import CompiledFxGraph

from snaketune.config.held_out import Evaluate
from snaketune.config.lora import Lora
from snaketune.config.training_runs import Sft
from snaketune.engine.model import compiling
from snaketune.engine.model.compiling import choose_compilation
from snaketune.engine.sft import SftTrainer
from snaketune.engine.throughput import LogCallback
from snaketune.errors import SnaketuneError

from .pipeline_runs import copy_after, held_out_pack, pack, spec, train
from .preference_runs import Trained

CPU = torch.device("cpu")


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def nothing_again(fresh, monkeypatch):
    """Raise an error if anything is compiled after the first step."""
    on_step_end, steps = LogCallback.on_step_end, []

    def ended(self, *arguments, **keywords):
        on_step_end(self, *arguments, **keywords)
        steps.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.compiler.set_stance("fail_on_recompile")

    monkeypatch.setattr(LogCallback, "on_step_end", ended)
    return steps


@pytest.fixture
def compiled_calls(monkeypatch):
    """Count the compiled graphs that each training step ran."""
    step, call, calls = SftTrainer.training_step, CompiledFxGraph.__call__, []

    def counted(self, *arguments):
        calls.append(0)
        return step(self, *arguments)

    def called(self, inputs):
        # The compiler and the compiled loss are tested before the first step.
        if calls:
            calls[-1] += 1
        return call(self, inputs)

    monkeypatch.setattr(SftTrainer, "training_step", counted)
    monkeypatch.setattr(CompiledFxGraph, "__call__", called)
    return calls


def weights(folder):
    return load_file(folder / "payload.partial/model.safetensors")


def test_held_out_rows_are_measured_without_compiling_anything(tmp_path, nothing_again):
    rows, held_out = pack(tmp_path / "pack", rows=12), held_out_pack(tmp_path / "held", rows=5, documents=(7, 21))
    made, every = spec(epochs=1, compile=True), Evaluate(every=1, samples=0)
    train(tmp_path / "blind", rows, made)
    torch.compiler.set_stance("default")
    measured = train(tmp_path / "measured", rows, made, held_out=held_out, evaluate=every)
    assert len(measured.run["held_out"]["points"]) == 4 and measured.about["compiled"]
    blind, same = weights(tmp_path / "blind"), weights(tmp_path / "measured")
    assert not [name for name in blind if not torch.equal(blind[name], same[name])]


@pytest.mark.parametrize(
    ("family", "lora", "checkpointing"),
    [
        pytest.param("llama", None, False, marks=pytest.mark.slow),
        ("qwen2", Lora(rank=2), True),
        pytest.param("mistral", None, True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_training_is_the_same_and_compiles_once(
    tmp_path, nothing_again, compiled_calls, family, lora, checkpointing
):
    # With 21 rows the last batch and the last step have one row.
    rows, settings = pack(tmp_path / "pack", rows=21), {"lora": lora, "gradient_checkpointing": checkpointing}
    compiled = train(tmp_path / "compiled", rows, spec(compile=True, **settings), family)
    # Forward and backward of each layer, in every step.
    assert min(compiled_calls) >= 4
    compiled_calls.clear()
    assert set(nothing_again) == {nothing_again[0]}
    torch.compiler.set_stance("default")
    eager = train(tmp_path / "eager", rows, spec(compile=False, **settings), family)
    assert not any(compiled_calls)
    assert (compiled.about.pop("compiled"), eager.about.pop("compiled")) == (True, False)
    assert compiled.about == eager.about
    for one, other in zip(compiled.run["history"], eager.run["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    assert weights(tmp_path / "compiled").keys() == weights(tmp_path / "eager").keys()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, Lora(rank=2, dropout=0.3, target_modules=("c_attn", "c_fc"))])
def test_dropout_is_the_same(tmp_path, fresh, lora):
    # 20 rows: the last batch is as large as the others, so as many numbers are drawn.
    rows, config = pack(tmp_path / "pack", rows=20), tiny_config("gpt2")
    config.n_layer = 2
    assert config.resid_pdrop > 0
    compiled, eager = (
        train(tmp_path / str(setting), rows, spec(lora, compile=setting), lambda: tiny_model(config)).run["history"]
        for setting in (True, False)
    )
    assert [entry["loss"] for entry in compiled] == pytest.approx([entry["loss"] for entry in eager], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "aot"])
def test_preferences_on_trees(tmp_path, nothing_again, loss):
    """The second loss is of a whole step, so its forward runs without gradients first."""
    pairs = Trained(tmp_path, rows=10)
    # By SGD: the gradients agree to 3e-7, which Adam's first step amplifies where a gradient is almost zero.
    settings = {"micro_batch_rows": 2, "epochs": 2, "learning_rate": 1e-3, "optimizer": "sgd"}
    compiled, _ = pairs.train("compiled", {"loss": loss}, compile=True, **settings)
    assert len(nothing_again) == 6
    assert set(nothing_again) == {nothing_again[0]}
    torch.compiler.set_stance("default")
    eager, _ = pairs.train("eager", {"loss": loss}, compile=False, **settings)
    assert (compiled.about["compiled"], eager.about["compiled"]) == (True, False)
    for one, other in zip(compiled.run["history"], eager.run["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["margin"] == pytest.approx(other["margin"], rel=1e-2, abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


@pytest.mark.slow
def test_a_compiled_training_resumes_exactly(tmp_path, fresh, monkeypatch):
    rows, made = pack(tmp_path / "pack", rows=11), spec(epochs=2, compile=True)
    copy_after(1, tmp_path / "straight", tmp_path / "resumed", monkeypatch)
    train(tmp_path / "straight", rows, made)
    torch._dynamo.reset()
    train(tmp_path / "resumed", rows, made)
    straight, resumed = weights(tmp_path / "straight"), weights(tmp_path / "resumed")
    assert not [name for name in straight if not torch.equal(straight[name], resumed[name])]


def test_compiled_layers_with_another_loss_are_refused(tmp_path, fresh, monkeypatch):
    def break_layers(model, compute, checkpointing):
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, arguments, output: output.flip(-1))

    monkeypatch.setattr("snaketune.engine.trainer.compile_layers", break_layers)
    with pytest.raises(
        SnaketuneError, match=r"training\.compile: the compiled model's loss is .*; nothing was\s+trained"
    ):
        train(tmp_path / "work", pack(tmp_path / "pack"), spec(compile=True))


def test_auto_compiles_long_trainings_and_logs_why(monkeypatch):
    monkeypatch.setattr(compiling, "_compile_error", lambda device: "")
    short, long = choose_compilation("auto", 1e12, CPU), choose_compilation("auto", 1e14, CPU)
    assert (short.compiled, long.compiled) == (False, True)
    assert "too few to earn it back (2e+13 on cpu)" in short.reason
    assert "1.0e+14 FLOPs" in long.reason
    assert not choose_compilation("auto", 1e20, torch.device("mps")).compiled
    assert not choose_compilation(False, 1e20, CPU).compiled
    assert choose_compilation(True, 1.0, CPU).compiled


def test_without_layers_auto_continues_and_true_fails(tmp_path, fresh, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "MIN_FLOPS", {"cpu": 0.0})
    # A model with remote code.
    monkeypatch.setattr(compiling, "GradientCheckpointingLayer", type("Unknown", (), {}))
    rows = pack(tmp_path / "pack", rows=4)
    assert not train(tmp_path / "auto", rows, spec(epochs=1)).about["compiled"]
    assert "compiled: no (auto: this model has no layers" in capsys.readouterr().out
    with pytest.raises(SnaketuneError, match=r"training\.compile: this model has no layers .* expected `false`"):
        train(tmp_path / "true", rows, spec(epochs=1, compile=True))


def test_without_a_compiler_auto_continues_and_true_fails(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    # monkeypatch wouldn't restore a setting that torch looks up.
    with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "none"),)}):
        choice = choose_compilation("auto", 1e20, CPU)
        assert not choice.compiled
        assert "torch can't compile here" in choice.reason
        with pytest.raises(
            SnaketuneError, match=r"training\.compile: torch can't compile here .*expected `auto` or `false`"
        ):
            choose_compilation(True, 1e20, CPU)


def test_rows_that_are_not_packed_are_not_compiled():
    run = {"base": {"path": "some/model"}, "corpus": "c", "tokenizer": "t", "packing": {"strategy": "none"}}
    Sft.model_validate(run | {"training": {"learning_rate": 1e-3}})
    with pytest.raises(ValidationError, match=r"training\.compile: unpacked rows have different shapes"):
        Sft.model_validate(run | {"training": {"learning_rate": 1e-3, "compile": True}})
