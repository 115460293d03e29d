"""A CPU stand-in for torch's varlen attention: one opaque operator with a backward, as strict as the CUDA kernel.

The real kernel has no CPU implementation. Like it, the stand-in takes 16-bit, contiguous tensors of one head size, and aligns
the last query of a segment with its last key; in `torch.compile` it is a single node without Python code.
"""

from itertools import pairwise

import torch

# Recorded arguments of the calls, newest last.
CALLS: list[dict] = []


def _segments(cu_q: torch.Tensor, cu_k: torch.Tensor):
    return [(slice(*own), slice(*seen)) for own, seen in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()))]


def _logits(query_QHD, key_WHD, scale: float, window: int) -> torch.Tensor:
    """Return logits [H, Q, W], -inf where a query doesn't see the key."""
    queries, width = len(query_QHD), len(key_WHD)
    back = torch.arange(width - queries, width)[:, None] - torch.arange(width)
    hidden = (back < 0) | ((back > window) if window >= 0 else False)
    return (torch.einsum("qhd,whd->hqw", query_QHD, key_WHD) * scale).masked_fill(hidden, -torch.inf)


def _grouped(tensor_WKD: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor_WKD.float().repeat_interleave(heads // tensor_WKD.shape[1], 1)


def attended(query, key, value, cu_q, cu_k, scale: float, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, H, D] and the log-sum-exp of the logits, float32[H, T], in any data type."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for own, seen in _segments(cu_q, cu_k):
        keys, values = (_grouped(tensor[seen], query.shape[1]) for tensor in (key, value))
        logits_HQW = _logits(query[own].float(), keys, scale, window)
        lse[:, own] = logits_HQW.logsumexp(-1)
        out[own] = torch.einsum("hqw,whd->qhd", logits_HQW.softmax(-1), values).to(out)
    return out, lse


def gradients_of(
    grad, query, key, value, out, lse, cu_q, cu_k, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of queries, keys and values in the way of flash: weights from `lse`, and their sums from `out`."""
    gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value)]
    heads, groups = query.shape[1], key.shape[1]
    delta_HT = (grad.float() * out.float()).sum(-1).T
    for own, seen in _segments(cu_q, cu_k):
        query_QHD, grad_QHD = query[own].float(), grad[own].float()
        keys, values = (_grouped(tensor[seen], heads) for tensor in (key, value))
        weights_HQW = (_logits(query_QHD, keys, scale, window) - lse[:, own, None]).exp()
        of_weights_HQW = torch.einsum("qhd,whd->hqw", grad_QHD, values)
        of_scores_HQW = weights_HQW * (of_weights_HQW - delta_HT[:, own, None]) * scale
        gradients[0][own] += torch.einsum("hqw,whd->qhd", of_scores_HQW, keys)
        for total, grad_WHD in (
            (gradients[1], torch.einsum("hqw,qhd->whd", of_scores_HQW, query_QHD)),
            (gradients[2], torch.einsum("hqw,qhd->whd", weights_HQW, grad_QHD)),
        ):
            total[seen] += grad_WHD.unflatten(1, (groups, heads // groups)).sum(2)
    return tuple(total.to(tensor.dtype) for total, tensor in zip(gradients, (query, key, value)))


@torch.library.custom_op("snaketune_tests::varlen", mutates_args=())
def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    longest: int, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return [T, H, D] for queries [T, H, D] and keys and values [U, K, D], and the log-sum-exp [H, T]."""
    CALLS.append({
        "dtypes": {query.dtype, key.dtype, value.dtype}, "head_sizes": (key.shape[-1], value.shape[-1]),
        "segments": len(cu_q) - 1, "longest": longest, "window": window,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    })  # fmt: skip
    if {query.dtype, key.dtype, value.dtype} - {torch.bfloat16, torch.float16} or query.dtype != value.dtype:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {query.dtype}, {value.dtype}")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        raise RuntimeError(f"head sizes {query.shape[-1]}, {value.shape[-1]}")
    segments = _segments(cu_q, cu_k)
    if (most := max(max(q.stop - q.start, k.stop - k.start) for q, k in segments)) > longest:
        raise RuntimeError(f"a segment of {most} tokens, and max_q is {longest}")
    if (segments[-1][0].stop, segments[-1][1].stop) != (len(query), len(key)):
        raise RuntimeError("the cumulative lengths don't end with the tensors")
    return attended(query, key, value, cu_q, cu_k, scale, window)


@varlen.register_fake
def _(query, key, value, cu_q, cu_k, longest, scale, window):
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("snaketune_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return gradients of queries, keys and values."""
    if {grad.dtype, out.dtype} != {query.dtype} or lse.dtype != torch.float32:
        raise RuntimeError(f"the output is {out.dtype}, its gradient {grad.dtype} and the log-sum-exp {lse.dtype}")
    return gradients_of(grad, query, key, value, out, lse, cu_q, cu_k, scale, window)


@varlen_backward.register_fake
def _(grad, query, key, value, out, lse, cu_q, cu_k, scale, window):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx, inputs, output):
    query, key, value, cu_q, cu_k, _, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, cu_q, cu_k)


def _backward(ctx, grad, _):
    return *varlen_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None, None, None


varlen.register_autograd(_backward, setup_context=_setup)


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """Stand-in with the signature of `torch.nn.attention.varlen.varlen_attn`."""
    assert window_size[1] == 0 and max_q == max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return varlen(query, key, value, cu_q, cu_k, max_q, scale, window_size[0])[0]


def varlen_forward_of_sinks(query, key, value, segments, longest, scale, window):
    """Stand-in with the signature of `engine.model.varlen_sinks.varlen_forward`."""
    return varlen(query, key, value, *segments, longest, scale, window)


def varlen_backward_of_sinks(grad, inputs, out, lse, segments, longest, scale, window):
    """Stand-in with the signature of `engine.model.varlen_sinks.varlen_backward`."""
    return varlen_backward(grad, *inputs, out, lse, *segments, scale, window)
