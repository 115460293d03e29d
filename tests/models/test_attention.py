"""Packed equals separate: logits, log-probabilities and gradients, for every architecture and CPU kernel."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.families.examine import Rows
from benchmarks.families.tiny import tiny_config
from benchmarks.families.tiny import tiny_model as tiny_model_of

from snaketune.engine.model.attention import use_segment_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.forward import allow_packed, packed_inputs
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.model.packing_support import check_config
from snaketune.engine.model.selftest import self_test
from snaketune.engine.packing.segments import PADDING_SEGMENT

from .conftest import CPU, VOCABULARY, tiny_model

LENGTH = 40
# Two documents and padding; a pair with a shared prompt of 7; and a full row.
WINDOWED = (([11, 23, 5], [0, 0, 0], 48), ([17, 8, 12], [0, 5, 17], 45))
ROWS = [([13, 9], [0, 0]), ([15, 6], [0, 7]), ([4, 9, 20, 7], [0, 2, 0, 11])]


def packed_rows(seed: int = 0) -> list[dict]:
    generator = np.random.default_rng(seed)
    rows = []
    for lengths, prefixes in ROWS:
        used = sum(lengths)
        ids = np.zeros(LENGTH, np.int32)
        ids[:used] = generator.integers(2, VOCABULARY, used)
        labels = np.where((generator.random(LENGTH) < 0.6) & (np.arange(LENGTH) < used), ids, -100).astype(np.int32)
        at = offset = 0
        for length, prefix in zip(lengths, prefixes):
            if not prefix:
                labels[at] = -100
                offset = at
            at += length
        assert offset < LENGTH
        rows.append(
            {
                "input_ids": ids,
                "labels": labels,
                "segment_lengths": np.array(lengths, np.int32),
                "prefix_lengths": np.array(prefixes, np.int32),
            }
        )
    return rows


def separate_losses(model, rows) -> torch.Tensor:
    """Return losses of every sequence alone with the model's own attention, in the order of the packed targets."""
    losses = []
    for row in rows:
        at = offset = 0
        for length, prefix in zip(row["segment_lengths"].tolist(), row["prefix_lengths"].tolist()):
            if not prefix:
                offset = at
            positions = [*range(offset, offset + prefix), *range(at, at + length)]
            ids = torch.from_numpy(row["input_ids"][positions].astype(np.int64))
            log_probs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            for column in range(prefix, len(positions)):
                if row["labels"][positions[column]] != -100:
                    losses.append(-log_probs[column - 1, ids[column]])
            at += length
    return torch.stack(losses)


@pytest.mark.parametrize("kernel", ["sdpa", "dense"])
def test_packed_losses_and_gradients_equal_separate_ones(model, kernel):
    rows = packed_rows()
    expected = separate_losses(model, rows)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    use_segment_attention(model)
    allow_packed(model, kernel, prefixes=True)
    actual = token_losses(model, collate(rows, kernel))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_tokens_of_one_document_never_change_another():
    model = tiny_model("llama")
    use_segment_attention(model)
    rows = packed_rows()
    with torch.no_grad():
        before = model(**packed_inputs(collate(rows, "sdpa"))).logits[0]
        rows[0]["input_ids"][:13] = 5
        after = model(**packed_inputs(collate(rows, "sdpa"))).logits[0]
    assert not torch.equal(before[:13], after[:13])
    assert torch.equal(before[13:], after[13:])


# Each family, window and kernel once.
WINDOWS = [
    *(("mistral", 1, "sdpa"), ("mistral", 5, "dense"), ("gemma3_text", 8, "sdpa"), ("gemma3_text", 1, "dense")),
    *(("phi3", 5, "sdpa"), ("phi3", 16, "dense")),
]


@pytest.mark.parametrize(
    ("family", "window", "kernel"),
    [
        pytest.param(*case, marks=[] if case in WINDOWS else pytest.mark.slow)
        for case in product(("mistral", "gemma3_text", "phi3"), (1, 5, 8, 16), ("sdpa", "dense"))
    ],
)
def test_sequences_longer_than_the_sliding_window_equal_separate_ones(family, window, kernel):
    rows = Rows(WINDOWED)
    for row in rows:
        row["labels"][np.cumsum([0, *row["segment_lengths"][:-1]])[row["prefix_lengths"] == 0]] = -100
    config = tiny_config(family, sliding_window=window)
    check_config(config, rows.longest[0], prefixes=True, kernel=kernel)
    alone, packed = tiny_model_of(config), tiny_model_of(config)
    wide = separate_losses(tiny_model_of(tiny_config(family, sliding_window=64)), rows)
    expected = separate_losses(alone, rows)
    assert not torch.allclose(wide, expected, rtol=1e-2), "the window makes no difference here"
    self_test(packed, [rows], replace(CPU, kernel=kernel), training=True)
    actual = token_losses(packed, collate(rows, kernel))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    actual.sum().backward()
    expected.sum().backward()
    for (name, one), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("prefixes", [False, True])
def test_varlen_kernels_get_the_segments_of_the_batch_and_a_length_that_all_batches_share(prefixes):
    actual = []
    for lengths in ([13, 9], [5, 4, 20, 7], [40]):
        row = {
            "input_ids": np.arange(400, dtype=np.int32),
            "labels": np.full(400, -100, np.int32),
            "segment_lengths": np.array(lengths),
            "prefix_lengths": np.array([0, *[2] * (len(lengths) - 1)]) * prefixes,
        }
        actual.append(collate([row, row], "varlen", longest=200)["segments"])
    assert {(some.longest, len(some.positions_T)) for some in actual} == {(200, 800)}
    for some in actual:
        own, seen = np.diff(some.cu_q), np.diff(some.cu_k)
        # Documents unchanged, padding in segments of PADDING_SEGMENT, and no empty segments.
        documents = some.layout.lengths[some.layout.documents]
        padding = 400 - sum(documents) // 2
        padding_segments = -(-padding // PADDING_SEGMENT)
        assert len(own) == len(seen) == len(documents) + 2 * padding_segments
        assert min(own) > 0 and max(own) <= PADDING_SEGMENT
        assert own.sum() == 800
        assert (some.keys_U is None) == (not some.layout.prefixed)
        assert seen.sum() == 800 + some.layout.prefix_lengths.sum()
    alone = collate([row], "varlen")["segments"]
    assert alone.longest == PADDING_SEGMENT
