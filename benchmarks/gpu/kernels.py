"""Tests of every kernel against the dense mask, forward and backward, over all cases and data types.

The model is a small one with grouped queries or without, a sliding window or none; the rows hold documents of different
lengths and free tokens, completions that share their prompts, or trees of them. The dense mask itself is held against every
document alone by transformers' own attention. A kernel that refuses a situation by name isn't wrong; one that fails or
differs is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from benchmarks.alone import losses_alone
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snaketune.engine.model.attention import Unpackable, use_own_attention, use_segment_attention
from snaketune.engine.model.batches import collate
from snaketune.engine.model.compiling import compile_layers
from snaketune.engine.model.devices import Compute
from snaketune.engine.model.forward import allow_packed
from snaketune.engine.model.logprobs import token_losses
from snaketune.engine.packing.shards import IGNORED

# These take 16 bits alone.
HALF_ONLY = {"varlen", "flash_attention_2", "flash_attention_4"}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
VOCABULARY, LENGTH = 256, 96
# By kind, for each row: its segments, their prefixes; of trees also the segments of these, and the completions. Trees have a
# third level, and a sibling that starts inside its prefix; some positions predict several tokens.
ROWS: dict[str, list[tuple[list[int], ...]]] = {
    "documents": [([37, 19, 28], [0, 0, 0]), ([64, 5, 11], [0, 0, 0])],
    "prefixes": [([37, 19, 28], [0, 21, 30]), ([64, 5, 11], [0, 40, 64])],
    "trees": [
        ([37, 19, 28], [0, 21, 30], [0, 0, 1], [0, 1, 2, 0]),
        ([48, 13, 11, 9, 6], [0, 30, 41, 35, 41], [0, 0, 1, 0, 1], [0, 2, 3, 4]),
    ],
}
COLUMNS = ("segment_lengths", "prefix_lengths", "prefix_segments", "completions")
# Weights and computation: as a full training has them, and as adapters on frozen weights do.
PRECISIONS = (
    ("float32", torch.float32, torch.float32),
    ("bfloat16", torch.float32, torch.bfloat16),
    ("bfloat16 weights", torch.bfloat16, torch.bfloat16),
)


@dataclass(frozen=True)
class Case:
    name: str
    rows: str = "documents"
    kv_heads: int = 4
    window: int | None = None
    compiled: bool = False


CASES = (
    Case("documents"),
    Case("grouped queries", kv_heads=2),
    Case("prefixes", "prefixes"),
    Case("grouped queries, prefixes", "prefixes", kv_heads=2),
    Case("trees", "trees"),
    Case("grouped queries, trees", "trees", kv_heads=2),
    Case("grouped queries, window", kv_heads=2, window=16),
    # Last, for compilation takes longest.
    Case("grouped queries, prefixes, compiled", "prefixes", kv_heads=2, compiled=True),
    Case("grouped queries, trees, compiled", "trees", kv_heads=2, compiled=True),
    Case("grouped queries, window, compiled", kv_heads=2, window=16, compiled=True),
)


def check(
    kernel: str, device: torch.device, compiled: tuple[str, ...] = ("float32", "bfloat16")
) -> Iterator[dict[str, Any]]:
    """Yield one entry per case and precision: right, wrong, refused or failed, with the differences or the error.

    Args:
        compiled: the precisions in which it is compiled too.
    """
    for case in CASES:
        for name, weights, dtype in PRECISIONS:
            if (dtype == torch.float32 and kernel in HALF_ONLY) or (case.compiled and name not in compiled):
                continue
            compute = Compute(device=device, dtype=dtype, kernel=kernel)
            yield {"kernel": kernel, "case": case.name, "precision": name} | _judged(case, compute, weights)


def _judged(case: Case, compute: Compute, weights: torch.dtype) -> dict[str, Any]:
    try:
        model = _model(case, compute.device, weights)
        rows = _rows(case)
        if compute.kernel == "dense":
            # Each document alone.
            use_own_attention(model)
            expected = _losses_and_gradients(model, rows, compute, losses_alone)
            use_segment_attention(model)
        else:
            use_segment_attention(model)
            expected = _losses_and_gradients(model, rows, replace(compute, kernel="dense"))
        if case.compiled:
            torch._dynamo.reset()
            compile_layers(model, compute, checkpointing=False)
        got = _losses_and_gradients(model, rows, compute)
    except Unpackable as error:
        return {"status": "refused", "why": str(error)}
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {str(error).strip()[:2000]}"}
    # The largest difference relative to the largest value.
    forward, backward = (((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected))
    # Not a number is wrong too.
    right = forward <= TOLERANCE[compute.dtype] and backward <= TOLERANCE[compute.dtype]
    return {"status": "right" if right else "wrong", "forward": forward, "backward": backward}


def _losses_and_gradients(
    model: PreTrainedModel, rows: list[dict[str, Any]], compute: Compute, losses_of=token_losses
) -> tuple[torch.Tensor, torch.Tensor]:
    # This test replaces the self-test.
    allow_packed(model, compute.kernel, prefixes=True)
    model.zero_grad()
    with compute.autocast():
        losses_N = losses_of(model, collate(rows, compute.kernel).to(compute.device))
    losses_N.sum().backward()
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return losses_N.detach().float(), gradients


def _model(case: Case, device: torch.device, weights: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "mistral", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=case.kv_heads, head_dim=32, max_position_embeddings=LENGTH,
        sliding_window=case.window, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device, weights).train()


def _rows(case: Case) -> list[dict[str, Any]]:
    generator = np.random.default_rng(1)
    rows = []
    for lengths, prefixes, *tree in ROWS[case.rows]:
        ids = generator.integers(2, VOCABULARY, LENGTH).astype(np.int32)
        starts, position = np.cumsum([0, *lengths]), np.arange(LENGTH)
        labels = np.where((position % 3 > 0) & (position < starts[-1]), ids, IGNORED).astype(np.int32)
        # The first token of a document has none before it.
        labels[starts[:-1]] = np.where(np.array(prefixes) > 0, ids[starts[:-1]], IGNORED)
        lists = {name: np.array(values, np.int32) for name, values in zip(COLUMNS, (lengths, prefixes, *tree))}
        rows.append({"input_ids": ids, "labels": labels, **lists})
    return rows
