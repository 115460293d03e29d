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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snaketune.models.attention import Unpackable, use_own_attention, use_segment_attention
from snaketune.models.batches import collate
from snaketune.models.compiling import compile_layers
from snaketune.models.devices import Compute
from snaketune.models.forward import allow_packed
from snaketune.models.logprobs import separate_token_losses, token_losses
from snaketune.packing.shards import IGNORED

# These take 16 bits alone.
HALF_ONLY = {"varlen", "flash_attention_2", "flash_attention_4"}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
VOCABULARY, LENGTH = 256, 96
DOCUMENTS = [[37, 19, 28], [64, 5, 11]]
PREFIXES = [[0, 21, 30], [0, 40, 64]]
# Trees: with a third level, and with a sibling that starts inside its prefix; some positions predict several tokens.
TREES = [([37, 19, 28], [0, 21, 30], [0, 0, 1]), ([48, 13, 11, 9, 6], [0, 30, 41, 35, 41], [0, 0, 1, 0, 1])]
COMPLETIONS = [[0, 1, 2, 0], [0, 2, 3, 4]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case."""

    name: str
    kv_heads: int = 4
    window: int | None = None
    prefixes: bool = False
    trees: bool = False
    compiled: bool = False


CASES = (
    Case(name="documents"),
    Case(name="grouped queries", kv_heads=2),
    Case(name="prefixes", prefixes=True),
    Case(name="grouped queries, prefixes", kv_heads=2, prefixes=True),
    Case(name="trees", trees=True),
    Case(name="grouped queries, trees", kv_heads=2, trees=True),
    Case(name="grouped queries, window", kv_heads=2, window=16),
    Case(name="grouped queries, prefixes, compiled", kv_heads=2, prefixes=True, compiled=True),
    Case(name="grouped queries, trees, compiled", kv_heads=2, trees=True, compiled=True),
    Case(name="grouped queries, window, compiled", kv_heads=2, window=16, compiled=True),
)
# Weights and computation: as a full training has them, and as adapters on frozen weights do.
PRECISIONS = (
    ("float32", torch.float32, torch.float32),
    ("bfloat16", torch.float32, torch.bfloat16),
    ("bfloat16 weights", torch.bfloat16, torch.bfloat16),
)


def check(
    kernel: str, device: torch.device, compiled: tuple[str, ...] = ("float32", "bfloat16")
) -> Iterator[dict[str, Any]]:
    """Yield one entry per case and precision: right, wrong, refused or failed, with the differences or the error.

    Args:
        compiled: the precisions in which it is compiled too, last, for that takes longest.
    """
    for case in sorted(CASES, key=lambda case: case.compiled):
        for name, weights, dtype in PRECISIONS:
            if (dtype == torch.float32 and kernel in HALF_ONLY) or (case.compiled and name not in compiled):
                continue
            compute = Compute(device=device, dtype=dtype, kernel=kernel)
            yield {"kernel": kernel, "case": case.name, "precision": name} | _judged(case, compute, weights)


def _judged(case: Case, compute: Compute, weights: torch.dtype) -> dict[str, Any]:
    try:
        model = _model(case, compute.device, weights)
        batch = collate(_rows(case), compute.kernel).to(compute.device)
        expected = _expected(model, case, compute)
        use_segment_attention(model)
        if case.compiled:
            torch._dynamo.reset()
            compile_layers(model, compute, checkpointing=False)
        got = _losses_and_gradients(model, batch, compute)
    except Unpackable as error:
        return {"status": "refused", "why": str(error)}
    except Exception as error:
        return {"status": "failed", "why": f"{type(error).__name__}: {str(error).strip()[:2000]}"}
    forward, backward = (_share(one, other) for one, other in zip(got, expected))
    # Not a number is wrong too.
    right = forward <= TOLERANCE[compute.dtype] and backward <= TOLERANCE[compute.dtype]
    return {"status": "right" if right else "wrong", "forward": forward, "backward": backward}


def _expected(model: PreTrainedModel, case: Case, compute: Compute) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected values: the dense mask's; for the dense mask itself, those of each document alone."""
    if compute.kernel != "dense":
        use_segment_attention(model)
        batch = collate(_rows(case), "dense").to(compute.device)
        return _losses_and_gradients(model, batch, replace(compute, kernel="dense"))
    use_own_attention(model)
    model.zero_grad()
    with compute.autocast():
        losses = separate_token_losses(model, collate(_rows(case), "dense").to(compute.device))
    return _with_gradients(model, losses)


def _losses_and_gradients(model: PreTrainedModel, batch: dict[str, Any], compute: Compute):
    # This test replaces the self-test.
    allow_packed(model, compute.kernel, prefixes=True)
    model.zero_grad()
    with compute.autocast():
        losses = token_losses(model, batch)
    return _with_gradients(model, losses)


def _with_gradients(model: PreTrainedModel, losses_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses_N.sum().backward()
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return losses_N.detach().float(), gradients


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


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
    plain = [(lengths, np.array(prefixes) * case.prefixes, None) for lengths, prefixes in zip(DOCUMENTS, PREFIXES)]
    for number, (lengths, prefixes, prefix_segments) in enumerate(TREES if case.trees else plain):
        ids = generator.integers(2, VOCABULARY, LENGTH).astype(np.int32)
        starts = np.cumsum([0, *lengths])
        labels = np.where((np.arange(LENGTH) % 3 > 0) & (np.arange(LENGTH) < starts[-1]), ids, IGNORED).astype(np.int32)
        # The first token of a document has none before it.
        labels[starts[:-1]] = np.where(np.array(prefixes) > 0, ids[starts[:-1]], IGNORED)
        columns = {"segment_lengths": lengths, "prefix_lengths": prefixes}
        if case.trees:
            columns |= {"prefix_segments": prefix_segments, "completions": COMPLETIONS[number]}
        rows.append(
            {"input_ids": ids, "labels": labels}
            | {name: np.array(column, np.int32) for name, column in columns.items()}
        )
    return rows
