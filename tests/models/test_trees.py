"""Trees of completions, with shared tokens computed once, give the values and gradients of each completion alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.alone import losses_alone
from benchmarks.families.examine import CPU
from benchmarks.families.tiny import VOCABULARY, tiny_config, tiny_model

from snaketune.engine.model import fused_cross_entropy
from snaketune.engine.model.batches import collate
from snaketune.engine.model.kernels import SEPARATE
from snaketune.engine.model.logprobs import completion_logprobs, pair_logprobs, token_losses
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.segments import layout_of

from .conftest import gradients
from .made_trees import completions_alone, tree_rows

FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gpt2": {},
    "gemma3_text": {"final_logit_softcapping": 2.0, "sliding_window": 64},
    "mixtral": {},
    "phi3": {},
    "cohere": {"logit_scale": 0.25},
}
SLOW = pytest.mark.slow


class Rows(list):
    """Rows with the attributes of `PackedRows`."""

    longest, fullest, has_prefixes = (17, 2), 2, True


def alone(model: torch.nn.Module, rows: list[dict]) -> tuple[torch.Tensor, list[int]]:
    """Return summed log-probabilities and token counts of completions, each run as a separate sequence."""
    sums, counts = [], []
    for ids, labels in completions_alone(rows):
        logits_LV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        sums.append(-F.cross_entropy(logits_LV[:-1], torch.tensor(labels[1:]), reduction="sum"))
        counts.append(sum(label != -100 for label in labels[1:]))
    return torch.stack(sums), counts


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *((family, "sdpa") for family in ("llama", "qwen2", "gpt2", "gemma3_text", "mixtral")),
        *((family, "dense") for family in ("llama", "gemma3_text")),
        *(pytest.param(family, "sdpa", marks=SLOW) for family in ("qwen3", "phi3", "cohere")),
        *(pytest.param(family, "dense", marks=SLOW) for family in FAMILIES if family not in ("llama", "gemma3_text")),
    ],
)
def test_log_probabilities_and_gradients_equal_those_of_each_completion_alone(family, kernel):
    same_as_alone(tiny_config(family, **FAMILIES[family]), kernel)


@pytest.mark.parametrize(
    ("window", "kernel"),
    [(2, "sdpa"), (7, "dense"), *(pytest.param(*case, marks=SLOW) for case in ((7, "sdpa"), (2, "dense")))],
)
def test_windows_reach_up_the_tree(window, kernel):
    same_as_alone(tiny_config("mistral", sliding_window=window), kernel)


def test_one_key_head_for_all_query_heads():
    same_as_alone(tiny_config("qwen2", num_key_value_heads=1), "sdpa")


@pytest.mark.parametrize(
    ("family", "kernel", "path"),
    [
        *((family, "sdpa", "hybrid") for family in ("qwen3_next", "lfm2")),
        *(pytest.param(family, "sdpa", "hybrid", marks=SLOW) for family in ("granitemoehybrid", "mamba2")),
        *(("llama", SEPARATE, "separate"), ("bloom", "sdpa", "separate")),
    ],
)
def test_a_shared_prompt_is_computed_again_by_mixers_and_by_separate_documents(family, kernel, path):
    same_as_alone(tiny_config(family), kernel, path)


def test_a_head_that_cannot_run_in_chunks_runs_on_separate_documents(monkeypatch):
    monkeypatch.setattr("snaketune.engine.model.selftest.chunk_head", lambda *_: False)
    same_as_alone(tiny_config("llama"), SEPARATE, "separate")


def same_as_alone(config, kernel: str, path: str = "packed") -> None:
    rows = Rows(tree_rows(VOCABULARY))
    plain, packed = tiny_model(config), tiny_model(config)
    expected_C, counts = alone(plain, rows)
    tested = self_test(packed, [rows], replace(CPU, kernel=kernel), training=True)
    assert tested.path == path
    batch = collate(rows, tested.compute.kernel)
    found_C, counts_C = completion_logprobs(token_losses(packed, batch), batch)
    torch.testing.assert_close(found_C, expected_C, rtol=1e-5, atol=1e-5)
    assert counts_C.tolist() == counts
    # A weight for each completion, as in losses of pairs.
    weights_C = torch.linspace(-1, 2, len(expected_C))
    expected = gradients(plain, (expected_C * weights_C).sum())
    actual = gradients(packed, (found_C * weights_C).sum())
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=name)


def test_a_position_that_predicts_several_tokens_is_projected_once():
    rows = tree_rows(VOCABULARY)
    # Padding included, as in the rows.
    batch = collate(rows, "dense")
    placed = batch["segments"].layout
    assert len(batch["sources"]) == len(batch["sources"].unique()) < len(batch["targets"])
    supervised = np.flatnonzero((np.concatenate([row["labels"] for row in rows]) != -100) & (placed.parents >= 0))
    assert batch["sources"][batch["source_rows"]].tolist() == placed.parents[supervised].tolist()
    assert batch["targets"].tolist() == batch["input_ids"][0, supervised].tolist()


def test_a_shared_token_counts_for_each_of_its_completions():
    rows = tree_rows(VOCABULARY)
    batch = collate(rows, "sdpa")
    by_completion = [
        batch["targets"][batch["members"][batch["member_completions"] == number]].tolist()
        for number in range(len(batch["segments"].layout.completions))
    ]
    assert by_completion == [[label for label in labels[1:] if label != -100] for _, labels in completions_alone(rows)]
    sums_P2, counts_P2 = pair_logprobs(torch.arange(len(batch["targets"])).float(), batch)
    assert sums_P2.shape == counts_P2.shape == (8, 2)
    # The pair of equal completions.
    assert sums_P2[2, 0] == sums_P2[2, 1] != sums_P2[3, 0]


def test_trees_run_one_sequence_at_a_time_where_packing_is_unsupported():
    rows = tree_rows(VOCABULARY)
    model = tiny_model(tiny_config("llama"))
    batch = collate(rows, "sdpa")
    found_C, _ = completion_logprobs(losses_alone(model, batch), batch)
    torch.testing.assert_close(found_C, alone(model, rows)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "cohere", pytest.param("gpt2", marks=SLOW)])
def test_chunks_of_the_head_split_positions_and_not_their_tokens(family, monkeypatch):
    monkeypatch.setattr(fused_cross_entropy, "SAVED_LOGITS", 7 * VOCABULARY)
    monkeypatch.setattr(fused_cross_entropy, "MIN_CHUNK_ROWS", 1)
    same_as_alone(tiny_config(family, **FAMILIES[family]), "sdpa")


def test_completions_of_several_rows_are_in_order():
    # Rows that aren't full have a segment of padding.
    ends = [[0, 1, 2, 0], [0, 0, 2, 1, 1, 3], [3, 4, 5, 0, 2, 1]]
    expected = [first + end for first, row in zip((0, 4, 9), ends) for end in row]
    assert layout_of(tree_rows(VOCABULARY)).completions.tolist() == expected


def test_padding_is_removed_for_kernels_of_any_shape():
    rows = tree_rows(VOCABULARY)
    used = [int(row["segment_lengths"].sum()) for row in rows]
    batch = collate(rows, "sdpa")
    ids = [row["input_ids"][:tokens] for row, tokens in zip(rows, used)]
    assert batch["input_ids"][0].tolist() == np.concatenate(ids).tolist()
    assert batch["segments"].layout.tokens == batch["segments"].layout.document_tokens == sum(used)
    whole = collate(rows, "dense")
    assert whole["segments"].layout.tokens == sum(used) + 7
    assert torch.equal(batch["targets"], whole["targets"])
    nothing = {name: np.zeros(5 if name in ("input_ids", "labels") else 0, np.int32) for name in rows[0]}
    assert collate([nothing, nothing], "sdpa")["input_ids"].shape == (1, 1)
    assert collate([nothing, rows[0]], "sdpa")["input_ids"].shape == (1, used[0])
