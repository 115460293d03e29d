"""The self-test lets a right kernel pass and stops at one by which documents see each other."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snaketune.errors import SnaketuneError
from snaketune.models import attention, batches
from snaketune.models.selftest import check_packed_equals_separate
from snaketune.packing.segments import layout

from .conftest import tiny_model
from .test_attention import packed_rows


def test_every_kernel_of_this_device_passes(model):
    for row in packed_rows():
        for kernel in ("sdpa", "dense"):
            assert check_packed_equals_separate(model, [row], kernel, torch.float32) < 1e-4


def test_a_kernel_that_forgets_the_segments_is_stopped(monkeypatch):
    def plain_causal(query, key, value, segments, scaling, dropout):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(attention.KERNELS, "sdpa", plain_causal)
    with pytest.raises(SnaketuneError, match="self-test failed"):
        check_packed_equals_separate(tiny_model("llama"), packed_rows(), "sdpa", torch.float32)


def test_a_kernel_that_forgets_the_prefix_is_stopped(monkeypatch):
    def without_prefixes(lengths, prefixes, row_lengths):
        return layout(lengths, [np.zeros_like(row) for row in prefixes], row_lengths)

    monkeypatch.setattr(batches, "layout", without_prefixes)
    with pytest.raises(SnaketuneError, match="self-test failed"):
        check_packed_equals_separate(tiny_model("llama"), packed_rows()[1:], "sdpa", torch.float32)
