"""Attention with sinks on torch's varlen kernel, which has none: exact, in the forward and the backward pass.

A sink is the logit s of one key more, without a value. The kernel's output o and the log-sum-exp of its logits, lse, give those
of attention with the sink:

    lse' = logaddexp(lse, s)        o' = o * exp(lse - lse') = o * sigmoid(lse - s)

FlashAttention's backward computes the attention weights as exp(logits - lse), and reads o only for rowsum(do * o). With o' and
lse' in place of o and lse it returns the gradients of q, k and v under the sink, windows included. The sink's own gradient is
the sum of -exp(s - lse') * rowsum(do * o') over the queries.

Shapes as in `kernels`: T tokens, H query heads, K key/value heads, D head size, U keys of all segments' full sequences.
"""

from typing import Any

import torch


def varlen_forward(
    query_THD: torch.Tensor, key_UKD: torch.Tensor, value_UKD: torch.Tensor, segments: tuple[torch.Tensor, ...],
    longest: int, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output [T, H, D] and lse, float32[H, T], of torch's kernel without a gradient. `segments`: cu_q and cu_k;
    `window`: keys before the query that it sees, -1 for all."""
    # The operator below torch's public function, whose backward takes no lse. These arguments are the same in 2.11 and 2.13.
    common = (*segments, longest, longest, window == -1, scale, [window, 0])
    out_THD, lse_HT, _ = torch.ops.torch_attn._varlen_attn(query_THD, key_UKD, value_UKD, *common)
    return out_THD, lse_HT


def varlen_backward(
    grad_THD: torch.Tensor, inputs: tuple[torch.Tensor, ...], out_THD: torch.Tensor, lse_HT: torch.Tensor,
    segments: tuple[torch.Tensor, ...], longest: int, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of `inputs` (queries, keys, values) by torch's kernel, given the output's gradient."""
    # States of random numbers, for dropout, which the kernel doesn't have.
    unused = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device)
    common = (*segments, longest, longest, window == -1, unused, scale, [window, 0])
    return torch.ops.torch_attn._varlen_attn_backward(grad_THD, *inputs, out_THD, lse_HT, *common)


class AttentionWithSinks(torch.autograd.Function):
    """Attention [T, H, D] of queries, keys and values with sinks, float32[H]; other arguments as in `varlen_forward`."""

    @staticmethod
    def forward(ctx: Any, query_THD, key_UKD, value_UKD, sinks_H, cu_q, cu_k, longest, scale, window) -> torch.Tensor:
        plain_THD, lse_HT = varlen_forward(query_THD, key_UKD, value_UKD, (cu_q, cu_k), longest, scale, window)
        share_HT = torch.sigmoid(lse_HT - sinks_H[:, None])
        out_THD = (plain_THD * share_HT.T[..., None]).to(plain_THD.dtype)
        lse_HT = torch.logaddexp(lse_HT, sinks_H[:, None])
        ctx.save_for_backward(query_THD, key_UKD, value_UKD, sinks_H, cu_q, cu_k, out_THD, lse_HT)
        ctx.options = longest, scale, window
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_THD, key_UKD, value_UKD, sinks_H, cu_q, cu_k, out_THD, lse_HT = ctx.saved_tensors
        grad_THD, inputs = grad_THD.contiguous(), (query_THD, key_UKD, value_UKD)
        gradients = varlen_backward(grad_THD, inputs, out_THD, lse_HT, (cu_q, cu_k), *ctx.options)
        of_sinks_HT = -torch.exp(sinks_H[:, None] - lse_HT) * (grad_THD.float() * out_THD.float()).sum(-1).T
        return *gradients, of_sinks_HT.sum(1), None, None, None, None, None
