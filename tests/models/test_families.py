"""Model families are right or refused, never silently wrong. benchmarks/families makes the whole table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.families.examine import CPU, DOCUMENTS, PAIRS, Rows, examine
from benchmarks.families.tiny import tiny_config, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snaketune.evaluation.held_out import choose_forward, held_out_loss
from snaketune.models.attention import Unpackable, attend
from snaketune.models.batches import collate
from snaketune.models.kernels import segments_for
from snaketune.models.logprobs import SEPARATE, separate_token_losses, token_losses
from snaketune.models.packing_support import check_config
from snaketune.models.selftest import self_test
from snaketune.packing.segments import layout_of

# The most common families.
COMMON = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt2", "gpt_neox", "olmo2",
          "deepseek_v3")  # fmt: skip


@pytest.mark.parametrize("family", COMMON)
def test_the_most_used_families_are_right_in_everything(family):
    result = examine(family)
    assert (result.sft, result.dpo, result.trained) == ("right", "right", "right"), result


@pytest.mark.parametrize(
    "family",
    [
        *("lfm2", "jamba", "granitemoehybrid", "minimax", "recurrent_gemma", "mamba", "rwkv"),
        *("falcon", "bloom", "mpt", "xglm", "openai-gpt", "bart"),
    ],
)
def test_the_self_test_refuses_a_model_with_leaks_between_documents(family):
    """Independently of the config: models with state across the row, or attention that doesn't receive segments."""
    with pytest.raises(Unpackable, match=f"{family} doesn't support packed rows"):
        self_test(tiny_model(tiny_config(family)), [Rows(DOCUMENTS)], CPU, training=False)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        *((family, "more than scaled_dot_product_attention") for family in ("gpt_oss", "granite_swa", "mimo_v2_flash")),
        *((family, "ignore document boundaries") for family in ("mamba", "mamba2", "falcon_mamba", "lfm2")),
        *((family, "ignore document boundaries") for family in ("qwen3_next", "qwen3_5", "bamba", "zamba")),
        *((family, "ignore document boundaries") for family in ("falcon_h1", "nemotron_h", "olmo_hybrid")),
        *((family, "ignore document boundaries") for family in ("deepseek_v32", "glm_moe_dsa", "minimax")),
        *((family, "doesn't pass on the segments") for family in ("nemotron", "stablelm")),
        *((family, "soft-capped") for family in ("gemma2", "vaultgemma")),
        *((family, "carry a state") for family in ("rwkv", "xlstm")),
    ],
)
def test_unsupported_configs_are_refused_before_weights_are_loaded(family, reason):
    with pytest.raises(Unpackable) as caught:
        check_config(tiny_config(family), 20, prefixes=False, kernel="sdpa")
    message = str(caught.value)
    assert message.startswith(f"{family} doesn't support packed rows")
    assert reason in message
    assert "packing.strategy: none" in message


@pytest.mark.parametrize("family", ["gptj", "codegen", "gpt_neo"])
def test_attention_by_positions_is_right_for_documents_and_refused_for_shared_prompts(family):
    config = tiny_config(family)
    documents, pairs = Rows(DOCUMENTS), Rows(PAIRS)
    check_config(config, documents.longest[0], prefixes=False, kernel="sdpa")
    self_test(tiny_model(config), [documents], CPU, training=True)
    with pytest.raises(Unpackable, match="doesn't support shared prompts"):
        check_config(config, pairs.longest[0], prefixes=True, kernel="sdpa")
    with pytest.raises(Unpackable):
        self_test(tiny_model(config), [pairs], CPU, training=True)


def longrope(**settings):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_type": "longrope", "rope_theta": 10000.0}
    rope = factors | {"original_max_position_embeddings": 24}
    return tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=24, **settings)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    return tiny_config("llama", rope_parameters=rope, max_position_embeddings=24)


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_batch_dependent_rotary_factors_ignore_padding_and_refuse_longer_sequences(make):
    config = make()
    # Enough padding to exceed the original length, if it had positions that continue those of the documents.
    rows = Rows((([11, 9], [0, 0], 60),))
    check_config(config, rows.longest[0], prefixes=False, kernel="sdpa")
    model = tiny_model(config)
    expected = separate_token_losses(tiny_model(config), collate(rows, "sdpa"))
    self_test(model, [rows], CPU, training=True)
    torch.testing.assert_close(token_losses(model, collate(rows, "sdpa")), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unpackable, match="a sequence of 30 tokens is longer than the 24"):
        check_config(config, 30, prefixes=False, kernel="sdpa")
    with pytest.raises(Unpackable):
        self_test(tiny_model(config), [Rows((([30, 9], [0, 0], 40),))], CPU, training=False)


def test_attention_chunks_that_layers_do_not_pass_to_kernels_are_refused():
    config = tiny_config("llama4_text", attention_chunk_size=16)
    check_config(config, 16, prefixes=False, kernel="sdpa")
    with pytest.raises(
        Unpackable, match=r"20 tokens is longer than the window of 16 that some layers have.*lower packing\.length"
    ):
        check_config(config, 20, prefixes=False, kernel="sdpa")


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_soft_capped_attention_is_accepted_where_the_kernel_supports_it(family):
    check_config(tiny_config(family), 20, prefixes=True, kernel="flash_attention_2")
    with pytest.raises(Unpackable, match="which kernel varlen doesn't support"):
        check_config(tiny_config(family), 20, prefixes=True, kernel="varlen")


def test_a_window_that_no_layer_uses_is_ignored():
    check_config(tiny_config("qwen2", sliding_window=16, use_sliding_window=False), 400, prefixes=False, kernel="sdpa")


@pytest.mark.parametrize("name", ["s_aux", "sinks", "position_bias", "something_new"])
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


@pytest.mark.parametrize("family", ["mamba", "lfm2", "gpt_oss", "bloom"])
def test_evaluation_runs_what_cannot_be_packed_one_sequence_at_a_time(family, capsys):
    config = tiny_config(family)
    model, rows = tiny_model(config), Rows(DOCUMENTS)
    compute, about, _ = choose_forward(model, config, [rows], CPU)
    assert compute.kernel == SEPARATE
    assert about == {"kernel": SEPARATE, "dtype": "float32"}
    assert f"{family} doesn't support packed rows" in capsys.readouterr().out
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
    result, documents = held_out_loss(model, rows, replace(CPU, kernel=about["kernel"]), "made")
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
