"""What a kernel that takes 16 bits alone is handed, in each kind of training and in the passes before its loop."""

import pytest
import torch

from snaketune.config.runs import Lora, Quantization
from snaketune.models.attention import Unpackable
from snaketune.models.selftest import self_test
from tests.models.conftest import tiny_model
from tests.training.pipeline_runs import pack, spec, train
from tests.training.preference_runs import Trained

from .conftest import VARLEN


@pytest.mark.parametrize(
    ("lora", "quantization"), [(None, None), (Lora(rank=2), None), (Lora(rank=2), Quantization(double=False))]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_hands_16_bits_to_the_kernel(tmp_path, calls, lora, quantization, checkpointing):
    """The stand-in refuses float32, as the kernel does; under QLoRA the residual stream is of float32."""
    made = spec(lora, epochs=1, gradient_checkpointing=checkpointing)
    made = made.model_copy(update={"quantization": quantization})
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=8), made, "qwen2", compute=VARLEN)
    assert (outcome.about["kernel"], outcome.about["dtype"]) == ("varlen", "bfloat16")
    assert "preferred_kernel" not in outcome.about
    assert {dtype for call in calls for dtype in call["dtypes"]} == {torch.bfloat16}


@pytest.mark.parametrize("loss", ["sigmoid", "aot"])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_dpo_too_in_its_check_and_where_a_step_is_weighed_first(tmp_path, calls, lora, loss):
    pairs = Trained(tmp_path, family="qwen2", compute=VARLEN, frozen=bool(lora))
    calls.clear()
    outcome, _ = pairs.train("work", {"loss": loss}, lora=lora, epochs=1, micro_batch_rows=2)
    assert outcome.about["kernel"] == "varlen"
    assert {dtype for call in calls for dtype in call["dtypes"]} == {torch.bfloat16}


def test_dropout_of_attention_weights_takes_the_next_kernel_and_says_why(tmp_path, calls, capsys):
    made, rows = spec(epochs=1), pack(tmp_path / "pack", rows=8)
    outcome = train(tmp_path / "work", rows, made, lambda: tiny_model("qwen2", attention_dropout=0.1), compute=VARLEN)
    assert (outcome.about["kernel"], outcome.about["preferred_kernel"]) == ("sdpa", "varlen")
    said = capsys.readouterr().out
    assert "Qwen2Attention: kernel varlen has no dropout of attention weights (0.1). Taking kernel sdpa" in said
    assert ", sdpa, " in next(line for line in said.splitlines() if line.startswith("model: "))


def test_so_does_a_head_size_that_a_kernel_does_not_take(capsys, calls):
    model = tiny_model("llama", hidden_size=48)
    tested = self_test(model, [], VARLEN, training=True)
    assert (tested.compute.kernel, tested.preferred_kernel) == ("sdpa", "varlen")
    assert "takes heads of a multiple of 8 up to 256 numbers, and these have 12. Taking kernel sdpa" in (
        capsys.readouterr().out
    )
    assert not calls


def test_where_no_kernel_is_right_the_model_is_refused(calls):
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, arguments, output: output.roll(1, dims=1))
    with pytest.raises(Unpackable, match=r"differ from separate ones .*kernel sdpa.*strategy: none"):
        self_test(model, [], VARLEN, training=False)


def test_dpo_without_dropout_keeps_the_kernel(tmp_path, calls, monkeypatch):
    """A policy's dropout is off, so its attention's too."""
    monkeypatch.setattr(
        "tests.training.preference_runs.tiny_model",
        lambda family: tiny_model(family, attention_dropout=0.1),
    )
    pairs = Trained(tmp_path, family="qwen2", compute=VARLEN)
    outcome, _ = pairs.train("work", {"loss": "sigmoid"}, epochs=1)
    assert outcome.about["kernel"] == "varlen"


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_deterministic_training_asks_every_kernel_for_it_and_learns_the_same(tmp_path, calls, kind):
    """The CPU adds up in one order anyway, so nothing changes there; on a card it does."""
    losses = []
    for deterministic in (False, True):
        folder = tmp_path / str(deterministic)
        calls.clear()
        if kind == "sft":
            made = spec(epochs=1, deterministic=deterministic)
            outcome = train(folder / "work", pack(folder / "pack"), made, "qwen2", compute=VARLEN)
        else:
            pairs = Trained(folder, family="qwen2", compute=VARLEN)
            calls.clear()
            outcome, _ = pairs.train("work", {"loss": "ipo"}, epochs=1, deterministic=deterministic)
        assert {call["deterministic"] for call in calls} == {deterministic}
        losses.append([entry["loss"] for entry in outcome.run["history"]])
    assert losses[0] == losses[1]
