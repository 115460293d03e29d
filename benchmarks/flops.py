"""The work of a training step, as floating-point operations of matrix products.

Counted as published figures count it: 6 for each parameter that a real token is multiplied with (forward, and two matmuls
backward), 4 where the weights are frozen and have no gradients of their own; and attention over the pairs of tokens that see
each other. What `models.flops` counts, from numbers alone, for machines that lack what it needs; a test holds the two equal.
"""

from typing import Any

import numpy as np


def visible_pairs(lengths: np.ndarray) -> int:
    """Count the query-key pairs of causal attention in documents of these lengths.

    >>> visible_pairs(np.array([1, 3]))
    7
    """
    long = np.asarray(lengths, np.int64)
    return int((long * (long + 1) // 2).sum())


def packed_counts(batch: dict[str, Any]) -> dict[str, int]:
    """Count a collated batch of documents: real tokens, supervised ones, and visible pairs."""
    placed = batch["segments"].layout
    lengths = placed.lengths[placed.documents]
    supervised = len(batch["targets"])
    return {"tokens": int(lengths.sum()), "supervised": supervised, "visible_pairs": visible_pairs(lengths)}


def attention_flops(pairs: int, *, heads: int, head_dim: int, layers: int) -> float:
    """Count FLOPs of attention, forward and backward: two matmuls per query-key pair, and twice that backward."""
    return 3.0 * 4 * heads * head_dim * layers * pairs


def step_flops(parameters: int, tokens: int, attention: float, *, frozen: bool = False) -> float:
    """Count FLOPs of a step over real tokens, with attention within documents."""
    return (4.0 if frozen else 6.0) * parameters * tokens + attention
