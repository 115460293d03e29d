"""Families are right in packed rows, or documents run separately; none is silently wrong. The table: benchmarks/families."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.alone import losses_alone
from benchmarks.families.examine import CPU, DOCUMENTS, PAIRS, Rows, examine
from benchmarks.families.tiny import tiny_config, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snaketune.engine.model.attention import Unpackable, attend
from snaketune.engine.model.batches import collate
from snaketune.engine.model.kernels import SEPARATE, segments_for
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.packing_support import check_config, choose_kernel
from snaketune.engine.model.selftest import check_kernel, self_test
from snaketune.engine.packing.segments import layout_of
from snaketune.errors import SnaketuneError
from snaketune.evaluation.held_out import choose_forward, held_out_loss

# The families that people fine-tune most, and how their pairs are computed.
COMMON = (
    dict.fromkeys(
        ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"), "packed"
    )
    | dict.fromkeys(("gpt2", "gpt_neox", "olmo2", "deepseek_v3", "gpt_oss", "smollm3", "glm4"), "packed")
    | dict.fromkeys(("qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h"), "hybrid")
    | dict.fromkeys(("deepseek_v32", "stablelm"), "separate")
)


# One of each way of computing; caps, sinks and other mixers have tests below. The others are in docs/models.md too.
EACH = {"llama", "mixtral", "gpt2", "deepseek_v3", "qwen3_next", "stablelm"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", [pytest.param(one, marks=[] if one in EACH else pytest.mark.slow) for one in COMMON])
def test_the_most_used_families_are_right_in_everything(family):
    result = examine(family)
    assert (result.sft, result.dpo, result.lora) == (COMMON[family],) * 3, result
    assert result.trained == "right", result


@pytest.mark.parametrize(
    "family",
    [
        "minimax",
        "mamba2",
        *(
            pytest.param(one, marks=SLOW)
            for one in (
                "kimi_linear",
                "jamba",
                "qwen3_5_moe_text",
                "lfm3",
                "olmo_hybrid",
                "bamba",
                "falcon_h1",
                "zamba2",
            )
        ),
    ],
)
def test_hybrids_stay_packed(family):
    """But for their mixers; the losses and gradients of all families are in docs/models.md."""
    for rows in (Rows(DOCUMENTS), Rows(PAIRS)):
        tested = self_test(tiny_model(tiny_config(family)), [rows], CPU, training=True)
        assert tested.path == "hybrid"
        assert tested.about()["mixers"] == "by document"


@pytest.mark.parametrize(
    "family",
    [
        *("bloom", "bart", "recurrent_gemma"),
        *(pytest.param(one, marks=SLOW) for one in ("rwkv", "falcon", "mpt", "xglm", "openai-gpt", "zaya")),
    ],
)
def test_the_self_test_finds_leaks_between_documents(family, capsys):
    """Independently of the config: models with state across the row, or attention that doesn't receive segments."""
    model, rows = tiny_model(tiny_config(family)), Rows(DOCUMENTS)
    with pytest.raises(Unpackable, match=f"{family} doesn't support packed rows"):
        check_kernel(model, [rows], CPU, training=False)
    assert self_test(model, [rows], CPU, training=True).path == "separate"
    assert f"{family} doesn't support packed rows" in capsys.readouterr().out
    batch = collate(rows, SEPARATE)
    expected = losses_alone(tiny_model(tiny_config(family)), batch)
    torch.testing.assert_close(token_losses(model, batch), expected, rtol=1e-4, atol=1e-4)


def test_mixers_that_run_on_whole_rows_are_found(monkeypatch):
    monkeypatch.setattr("snaketune.engine.model.mixers.MIXERS", re.compile("nothing"))
    with pytest.raises(
        Unpackable, match="qwen3_next doesn't support packed rows: packed logits of synthetic documents"
    ):
        check_kernel(tiny_model(tiny_config("qwen3_next")), [Rows(DOCUMENTS)], CPU, training=False)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_an_encoder_is_refused(family):
    """A model to which later tokens are visible."""
    model = tiny_model(tiny_config(family, is_decoder=False))
    with pytest.raises(
        Unpackable,
        match=f"{family} can't be computed beside other documents: packed logits .* most at token .* padded on the right",
    ):
        self_test(model, [Rows(DOCUMENTS)], CPU, training=False)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", "ignore document boundaries"),
        ("stablelm", "doesn't pass on the segments"),
        ("bloom", "can't be replaced"),
        *(pytest.param(family, "ignore document boundaries", marks=SLOW) for family in ("glm_moe_dsa", "deepseek_v4")),
        pytest.param("nemotron", "doesn't pass on the segments", marks=SLOW),
        pytest.param("rwkv", "can't be replaced", marks=SLOW),
    ],
)
def test_the_config_tells_before_weights_are_loaded_that_documents_run_separately(family, reason, capsys):
    compute = choose_kernel(CPU, tiny_config(family), 20, prefixes=True, dropout=False)
    assert compute == replace(CPU, kernel=SEPARATE)
    said = capsys.readouterr().out
    assert said.startswith(f"{family} doesn't support packed rows: ") and reason in said
    assert said.endswith("padded on the right (kernel separate)\n")


@pytest.mark.parametrize("family", ["gpt_neo", *(pytest.param(one, marks=SLOW) for one in ("gptj", "codegen"))])
def test_attention_by_positions_is_right_for_documents_and_refused_for_shared_prompts(family):
    config = tiny_config(family)
    documents, pairs = Rows(DOCUMENTS), Rows(PAIRS)
    check_config(config, documents.longest[0], prefixes=False, kernel="sdpa")
    self_test(tiny_model(config), [documents], CPU, training=True)
    with pytest.raises(Unpackable, match="doesn't support shared prompts"):
        check_config(config, pairs.longest[0], prefixes=True, kernel="sdpa")
    with pytest.raises(Unpackable):
        check_kernel(tiny_model(config), [pairs], CPU, training=True)


def longrope(**settings):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_type": "longrope", "rope_theta": 10000.0}
    rope = factors | {"original_max_position_embeddings": 24}
    return tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=24, **settings)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    return tiny_config("llama", rope_parameters=rope, max_position_embeddings=24)


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_batch_dependent_rotary_factors_ignore_padding(make):
    config = make()
    # Enough padding to exceed the original length, if it had positions that continue those of the documents.
    rows = Rows((([11, 9], [0, 0], 60),))
    model = tiny_model(config)
    expected = losses_alone(tiny_model(config), collate(rows, "sdpa"))
    assert self_test(model, [rows], CPU, training=True).path == "packed"
    torch.testing.assert_close(token_losses(model, collate(rows, "sdpa")), expected, rtol=1e-4, atol=1e-4)


def test_long_documents_run_apart_from_those_with_other_rotary_factors():
    config, rows = longrope(), Rows((([30, 20, 27, 9], [0, 0, 0, 0], 90),))
    with pytest.raises(Unpackable, match="a sequence of 30 tokens is longer than the 24"):
        check_config(config, 30, prefixes=False, kernel="sdpa")
    model = tiny_model(config)
    assert self_test(model, [rows], CPU, training=True).path == "separate"
    batch = collate(rows, SEPARATE)
    torch.testing.assert_close(
        token_losses(model, batch), losses_alone(tiny_model(config), batch), rtol=1e-4, atol=1e-4
    )
    assert batch["segments"].padded().shapes == ((2, 30), (2, 20))


def test_dynamic_rotary_factors_refuse_longer_documents():
    with pytest.raises(SnaketuneError, match=r"30 tokens is longer than the 24 .* Lower packing\.length to 24"):
        choose_kernel(CPU, dynamic(), 30, prefixes=False, dropout=False)


def test_with_attention_chunks_that_layers_do_not_pass_to_kernels_documents_run_separately():
    config = tiny_config("llama4_text", attention_chunk_size=16)
    check_config(config, 16, prefixes=False, kernel="sdpa")
    with pytest.raises(Unpackable, match="20 tokens is longer than the window of 16 that some layers have"):
        check_config(config, 20, prefixes=False, kernel="sdpa")


@pytest.mark.parametrize(
    ("family", "reason", "refused"),
    [
        ("gemma2", "soft-capped", "varlen"),
        ("gpt_oss", "sinks", "flash_attention_2"),
        pytest.param("mimo_v2_flash", "sinks", "flash_attention_2", marks=SLOW),
    ],
)
def test_capped_attention_and_sinks_are_computed_by_kernels_that_have_them(family, reason, refused):
    config = tiny_config(family, sliding_window=5)
    with pytest.raises(Unpackable, match=f"{reason}, which kernel {refused} doesn't support"):
        check_config(config, 20, prefixes=True, kernel=refused)
    for kernel in ("sdpa", "dense"):
        compute, rows = replace(CPU, kernel=kernel), Rows(PAIRS)
        model = tiny_model(config)
        assert check_kernel(model, [rows], compute, training=True).path == "packed"
        batch = collate(rows, kernel)
        torch.testing.assert_close(
            token_losses(model, batch), losses_alone(tiny_model(config), batch), rtol=1e-4, atol=1e-4
        )


def test_a_window_that_no_layer_uses_is_ignored():
    check_config(tiny_config("qwen2", sliding_window=16, use_sliding_window=False), 400, prefixes=False, kernel="sdpa")


@pytest.mark.parametrize("name", ["sinks", "position_bias", "something_new"])
def test_an_unsupported_attention_argument_is_refused_by_name(name):
    segments = segments_for("sdpa", layout_of(Rows(DOCUMENTS)))
    query = torch.randn(1, 2, len(segments.positions_T), 4)
    module = torch.nn.Linear(1, 1)
    attend(module, query, query, query, None, segments=segments, output_router_logits=True, **{name: None})
    with pytest.raises(Unpackable, match=f"Linear needs {name}"):
        attend(module, query, query, query, None, segments=segments, **{name: torch.ones(2)})
    with pytest.raises(Unpackable, match="attention_mask"):
        attend(module, query, query, query, torch.zeros(1), segments=segments)
    with pytest.raises(Unpackable, match="is_causal"):
        attend(module, query, query, query, None, segments=segments, is_causal=False)
    with pytest.raises(Unpackable, match="doesn't pass on the segments"):
        attend(module, query, query, query, None)


@pytest.mark.parametrize(("family", "kernel"), [("mamba", "sdpa"), ("gpt_oss", "sdpa"), ("bloom", SEPARATE)])
def test_an_evaluation_has_the_losses_of_documents_alone(family, kernel):
    config = tiny_config(family)
    model, rows = tiny_model(config), Rows(DOCUMENTS)
    compute, about, _ = choose_forward(model, config, [rows], CPU)
    assert about["kernel"] == compute.kernel == kernel
    expected, count = 0.0, 0
    for row in rows:
        at = 0
        for length in row["segment_lengths"].tolist():
            ids = torch.from_numpy(row["input_ids"][at : at + length].astype(np.int64))
            with torch.no_grad():
                log_probs = tiny_model(config)(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            for column in range(1, length):
                if row["labels"][at + column] >= 0:
                    expected, count = expected - log_probs[column - 1, ids[column]].item(), count + 1
            at += length
    result, documents = held_out_loss(model, rows, compute, "made")
    assert result["supervised_tokens"] == count
    assert result["held_out_loss"] == pytest.approx(expected / count, abs=1e-4)
    assert sum(documents["loss_nats"].to_pylist()) == pytest.approx(expected, rel=1e-4)
    assert sum(documents["tokens"].to_pylist()) == count


def test_evaluation_by_packed_rows_is_self_tested():
    config = tiny_config("llama")
    _, about, run = choose_forward(tiny_model(config), config, [Rows(DOCUMENTS)], CPU)
    assert about["self_test"] == "packed = separate within 1e-03"
    assert run["self_test_share"] < 1e-5


def test_the_table_has_every_family_and_none_is_wrong():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    assert "WRONG" not in page
    missing = [f for f in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if f"| {f} |" not in page and f"- {f}: " not in page]
    assert not missing
