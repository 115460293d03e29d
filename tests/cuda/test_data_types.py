"""Kernels that take 16 bits alone get 16 bits, in each kind of training and in the passes before its loop."""

from dataclasses import replace

import pytest
import torch
from benchmarks.families.tiny import tiny_config
from benchmarks.families.tiny import tiny_model as family_model

from snaketune.config.lora import Lora, Quantization
from snaketune.engine.model.attention import Unpackable
from snaketune.engine.model.packing_support import check_config, with_supported_kernel
from snaketune.engine.model.selftest import check_kernel, self_test
from snaketune.errors import SnaketuneError
from tests.cuda import standin
from tests.models.conftest import tiny_model
from tests.models.test_selftest import Rows
from tests.training.pipeline_runs import pack, spec, train
from tests.training.preference_runs import Trained

from .conftest import VARLEN


@pytest.mark.parametrize(
    ("lora", "quantization", "checkpointing"),
    [(None, None, False), (Lora(rank=2), None, True), (Lora(rank=2), Quantization(double=False), False)],
)
def test_sft_hands_16_bits_to_the_kernel(tmp_path, calls, lora, quantization, checkpointing):
    """The stand-in refuses float32, as the kernel does; under QLoRA the residual stream is in float32."""
    made = spec(lora, epochs=1, gradient_checkpointing=checkpointing)
    made = made.model_copy(update={"quantization": quantization})
    outcome = train(tmp_path / "work", pack(tmp_path / "pack", rows=8), made, "qwen2", compute=VARLEN)
    assert (outcome.about["kernel"], outcome.about["dtype"]) == ("varlen", "bfloat16")
    assert {dtype for call in calls for dtype in call["dtypes"]} == {torch.bfloat16}


@pytest.mark.parametrize(("lora", "loss"), [(None, "aot"), (Lora(rank=2), "sigmoid")])
def test_dpo_hands_16_bits_to_the_kernel_in_its_check_and_two_pass_step(tmp_path, calls, lora, loss):
    pairs = Trained(tmp_path, family="qwen2", compute=VARLEN, frozen=bool(lora))
    calls.clear()
    outcome, _ = pairs.train("work", {"loss": loss}, lora=lora, epochs=1, micro_batch_rows=2)
    assert outcome.about["kernel"] == "varlen"
    assert {dtype for call in calls for dtype in call["dtypes"]} == {torch.bfloat16}


@pytest.fixture
def with_dropout(monkeypatch):
    """Make preference trainings and references use a model whose config has attention dropout."""
    monkeypatch.setattr(
        "tests.training.preference_runs.tiny_model", lambda family: tiny_model(family, attention_dropout=0.1)
    )


def test_sft_with_dropout_of_attention_weights_uses_the_next_kernel_and_logs_why(tmp_path, calls, capsys):
    config = tiny_model("qwen2", attention_dropout=0.1).config
    made, rows = spec(epochs=1), pack(tmp_path / "pack", rows=8)
    compute = with_supported_kernel(VARLEN, config, dropout=True)
    outcome = train(
        tmp_path / "work",
        rows,
        made,
        lambda: tiny_model("qwen2", attention_dropout=0.1),
        compute=compute,
        config=config,
    )
    assert outcome.about["kernel"] == "sdpa"
    said = capsys.readouterr().out
    assert "attention: kernel varlen has no dropout of attention weights (0.1); using kernel sdpa" in said
    assert ", sdpa, " in next(line for line in said.splitlines() if line.startswith("model: "))
    # Evaluation has no dropout.
    assert with_supported_kernel(VARLEN, config, dropout=False) == VARLEN


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("llama", {"head_dim": 12}, "head sizes that are a multiple of 8 up to 256, not 12"),
        ("qwen3", {"head_dim": 264}, "up to 256, not 264"),
    ],
)
def test_an_unsupported_head_size_uses_the_next_kernel_and_logs_why(capsys, calls, family, settings, said):
    config = tiny_config(family, **settings)
    assert with_supported_kernel(VARLEN, config, dropout=False).kernel == "sdpa"
    out = capsys.readouterr().out
    assert said in out and out.endswith("using kernel sdpa\n")
    # If the kernel is chosen by name, the model is refused before weights are loaded, and by the self-test.
    with pytest.raises(Unpackable, match="kernel varlen takes"):
        check_config(config, 20, prefixes=False, kernel="varlen")
    with pytest.raises(Unpackable, match="kernel varlen takes"):
        check_kernel(tiny_model(family, **settings), [], VARLEN, training=True)
    assert not calls


def test_values_with_smaller_heads_than_keys_are_supported(calls):
    config = tiny_config("deepseek_v3", qk_rope_head_dim=8, head_dim=8, initializer_range=0.05)
    assert with_supported_kernel(VARLEN, config, dropout=False) == VARLEN
    model = family_model(config).train()
    self_test(model, [], VARLEN, training=True)
    assert calls[-1]["head_sizes"] == (16, 16)


def test_kernels_are_tried_from_the_fastest(monkeypatch, capsys):
    everything = ["flash_attention_4", "flash_attention_2", "varlen", "sdpa"]
    monkeypatch.setattr("snaketune.engine.model.packing_support.usable_kernels", lambda device, dtype: everything)
    four = replace(VARLEN, kernel="flash_attention_4")
    for config, dropout, kernel in (
        (tiny_config("llama"), True, "flash_attention_4"),
        (tiny_config("llama", head_dim=12), True, "flash_attention_2"),
        (tiny_config("qwen2", attention_dropout=0.1), True, "flash_attention_2"),
        (tiny_config("llama", head_dim=256), False, "flash_attention_2"),
        (tiny_config("llama", head_dim=264), False, "sdpa"),
        (tiny_config("gemma2"), False, "flash_attention_4"),
    ):
        assert with_supported_kernel(four, config, dropout=dropout).kernel == kernel
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_attention_that_only_sdpa_supports_uses_it(calls, capsys):
    config = tiny_config("gemma2")
    assert with_supported_kernel(VARLEN, config, dropout=False).kernel == "sdpa"
    assert "its attention is soft-capped, which kernel varlen doesn't support" in capsys.readouterr().out
    with pytest.raises(Unpackable, match="is soft-capped"):
        check_config(config, 20, prefixes=False, kernel="varlen")


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ImportError, Exception])
def test_a_kernel_that_raises_is_reported(monkeypatch, calls, error):
    def broken(*_, **__):
        raise error("no such instruction")

    monkeypatch.setattr("snaketune.engine.model.kernels.varlen_attn", broken)
    with pytest.raises(Unpackable, match=f"a packed forward fails \\({error.__name__}: no such instruction"):
        check_kernel(tiny_model("llama"), [], VARLEN, training=False)


def test_an_operation_without_a_deterministic_kernel_is_not_reported_as_unpackable(tmp_path, calls, monkeypatch):
    def adding(query, *_, **__):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        return query

    monkeypatch.setattr("snaketune.engine.model.kernels.varlen_attn", adding)
    with pytest.raises(SnaketuneError, match=r"^training\.deterministic: put_ does not .* expected `false`"):
        train(tmp_path / "work", pack(tmp_path / "pack", rows=8), spec(deterministic=True), compute=VARLEN)


def test_dpo_of_a_model_with_attention_dropout_uses_the_same_kernel(tmp_path, calls, with_dropout):
    """The policy's dropout is off, including that of attention weights."""
    pairs = Trained(tmp_path, family="qwen2", compute=VARLEN)
    outcome, _ = pairs.train("work", {"loss": "sigmoid"}, epochs=1)
    assert outcome.about["kernel"] == "varlen"


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_deterministic_training_uses_deterministic_kernels_and_gives_the_same_results(tmp_path, calls, kind):
    """On the CPU the order of sums is fixed anyway, so nothing changes; on a GPU it does."""
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


def test_in_16_bits_single_tokens_may_differ_and_many_may_not(monkeypatch, calls):
    """Rounding has this effect in pretrained models."""
    model, nothing = tiny_model("qwen2"), Rows([])
    nothing.has_prefixes = False

    def noisy(changed: slice) -> None:
        def attend(*arguments, **keywords):
            out = standin.varlen_attn(*arguments, **keywords)
            out[changed] = out[changed].flip(-1)
            return out

        monkeypatch.setattr("snaketune.engine.model.kernels.varlen_attn", attend)

    # The last token of the first document.
    noisy(slice(6, 7))
    tested = self_test(model, [nothing], VARLEN, training=True)
    assert tested.about()["self_test"] == "packed = separate within 5e-02 in 90% of the tokens"
    noisy(slice(0, 26))
    with pytest.raises(Unpackable, match="packed logits of synthetic documents differ"):
        check_kernel(model, [nothing], VARLEN, training=True)


@pytest.mark.parametrize(
    "change",
    [{"window_size": (3, 0)}, {"scale": 0.7}, {"cu_q": "as one", "cu_k": "as one"}],
    ids=["sees too little", "another scale", "sees other documents"],
)
def test_a_wrong_kernel_is_refused_in_16_bits_too(monkeypatch, calls, capsys, change):
    def wrong(query, key, value, cu_q, cu_k, longest, other, **keywords):
        if "cu_q" in change:
            cu_q, cu_k = (cu[[0, -1]] for cu in (cu_q, cu_k))
            longest = other = len(key)
        keywords |= {name: value for name, value in change.items() if name in keywords}
        return standin.varlen_attn(query, key, value, cu_q, cu_k, longest, other, **keywords)

    monkeypatch.setattr("snaketune.engine.model.kernels.varlen_attn", wrong)
    monkeypatch.setattr("snaketune.engine.model.selftest.usable_kernels", lambda device, dtype: ["varlen", "sdpa"])
    assert self_test(tiny_model("qwen2"), [], VARLEN, training=False).compute.kernel == "sdpa"
    assert capsys.readouterr().out.splitlines()[0].endswith("Trying kernel sdpa")
    with pytest.raises(Unpackable, match=r"differ from separate ones, most at token .*kernel varlen"):
        check_kernel(tiny_model("qwen2"), [], VARLEN, training=False)
