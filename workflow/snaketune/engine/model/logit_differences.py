"""Differences of the logits of two computations, relative to their scale, and which of them are rounding."""

import math

import torch

# Largest accepted difference relative to the scale, and the share of the tokens that must be within it.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
REQUIRED_SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}


def largest_differences(one_NV: torch.Tensor, other_NV: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute difference of each token's logits, float32[N]."""
    # Equal infinities, as of tokens that a model never generates, count as equal.
    return torch.where(one_NV == other_NV, 0.0, one_NV.float() - other_NV.float()).abs().amax(1)


def difference_quantile(shares_N: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference within the required share of the tokens (all; in 16 bits nine in ten); NaN if any is NaN.

    >>> shares = torch.tensor([0.01] * 18 + [0.02, 0.9])
    >>> round(difference_quantile(shares, torch.bfloat16), 3), round(difference_quantile(shares, torch.float32), 3)
    (0.01, 0.9)
    """
    # Not torch.quantile, which takes 16 million elements at most.
    ordered_N = shares_N.float().sort().values
    if ordered_N.isnan().any():
        return float("nan")
    return ordered_N[max(0, math.ceil(REQUIRED_SHARE[dtype] * len(ordered_N)) - 1)].item()


def scale_of(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the scale: the largest deviation of logits from their mean over the tokens, at least 1e-9."""
    deviation_NV = logits_NV.float() - logits_NV.float().mean(0)
    return deviation_NV.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-9)
