"""CPU attention over segments, block by block: keys aren't copied, no query runs twice, and no mask is built.

The visible (query, key) pairs are divided into blocks for torch's flash kernel, each a contiguous range of queries against a
contiguous range of keys. The pair [abCDEF][GH] that shares the prefix abC:

              a b C D E F G H
          a   x . . . . . . .
          b   x x . . . . . .
          C   x x x . . . . .      abCDEF: one causal block
          D   x x x x . . . .
          E   x x x x x . . .
          F   x x x x x x . .
          G   x x x . . . x .      GH: one causal block, and one full block for the prefix abC; a prefix that
          H   x x x . . . x x      spans several ancestors gets one full block for each of them

For each block the kernel returns an output and the log-sum-exp of its logits, from which the softmax over several blocks is
combined. In the backward pass the kernel gets the log-sum-exp over all blocks, which makes each block's gradients exact.

Shapes: T tokens, H query heads, K key/value heads, D head size, Q queries of a block.
"""

from typing import NamedTuple

import numpy as np
import torch

from snaketune.engine.packing.segments import SegmentLayout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(NamedTuple):
    """Queries [start, stop) against keys [key_start, key_stop): causal, or all of them."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    causal: bool


def attention_blocks(rows: SegmentLayout) -> tuple[Block, ...]:
    """Return the blocks to compute; the causal ones, which hold every token once, are first.

    >>> from snaketune.engine.packing.segments import layout
    >>> for block in attention_blocks(layout([[6, 2]], [[0, 3]], row_lengths=[8])):
    ...     print(*block)
    0 6 0 6 True
    6 8 6 8 True
    6 8 0 3 False
    """
    starts, stops = rows.starts.tolist(), (rows.starts + rows.lengths).tolist()
    # By end of the queries and range of keys: an adjacent sibling with the same prefix extends the block.
    prefixes: dict[tuple[int, int, int], int] = {}
    for segment in np.flatnonzero(rows.prefix_lengths).tolist():
        for keys in _prefix_ranges(rows, segment):
            prefixes[stops[segment], *keys] = prefixes.pop((starts[segment], *keys), starts[segment])
    causal = [Block(start, stop, start, stop, causal=True) for start, stop in zip(starts, stops)]
    return (*causal, *(Block(start, stop, *keys, causal=False) for (stop, *keys), start in prefixes.items()))


def _prefix_ranges(rows: SegmentLayout, segment: int) -> list[tuple[int, int]]:
    """Return the token ranges that hold a segment's prefix, from its end to its start; adjacent ranges are joined."""
    ranges: list[tuple[int, int]] = []
    remaining = int(rows.prefix_lengths[segment])
    while remaining:
        segment = int(rows.prefix_segments[segment])
        start, inherited = int(rows.starts[segment]), int(rows.prefix_lengths[segment])
        if remaining > inherited:
            end = start + remaining - inherited
            if ranges and ranges[-1][0] == end:
                end = ranges.pop()[1]
            ranges.append((start, end))
        remaining = min(remaining, inherited)
    return ranges


def can_attend(query_1HTD: torch.Tensor, value_1KTD: torch.Tensor) -> bool:
    """Whether torch's kernel supports these tensors: on a CPU, with equal head sizes of keys and values."""
    return query_1HTD.device.type == "cpu" and query_1HTD.shape[-1] == value_1KTD.shape[-1]


def attend_by_blocks(
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    blocks: tuple[Block, ...],
    scaling: float | None,
) -> torch.Tensor:
    """Return attention outputs [1, T, H, D]; matmuls in the data type of the values, sums over keys in float32."""
    tensors = (tensor.to(value_1KTD.dtype) for tensor in (query_1HTD, key_1KTD, value_1KTD))
    rows = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    return _BlockAttention.apply(*rows, blocks, scaling)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_1HTD, key_1KTD, value_1KTD, blocks, scaling):
        _, heads, tokens, _ = query_1HTD.shape
        out_1THD = query_1HTD.new_empty(1, tokens, heads, value_1KTD.shape[-1])
        out_1HTD = out_1THD.transpose(1, 2)
        sums_1HT = query_1HTD.new_empty(1, tokens, heads, dtype=torch.float32).transpose(1, 2)
        for block in blocks:
            parts = _slices(block, query_1HTD, key_1KTD, value_1KTD)
            block_1HQD, block_1HQ = _flash(*parts, 0.0, block.causal, scale=scaling)
            total_1HQD, total_1HQ = (total[:, :, block.start : block.stop] for total in (out_1HTD, sums_1HT))
            if block.causal:
                total_1HQD.copy_(block_1HQD)
                total_1HQ.copy_(block_1HQ)
            else:
                share_1HQ = torch.sigmoid(block_1HQ - total_1HQ)
                total_1HQD.lerp_(block_1HQD, share_1HQ[..., None].to(block_1HQD.dtype))
                torch.logaddexp(total_1HQ, block_1HQ, out=total_1HQ)
        ctx.save_for_backward(query_1HTD, key_1KTD, value_1KTD, out_1THD, sums_1HT)
        ctx.blocks, ctx.scaling = blocks, scaling
        return out_1THD

    @staticmethod
    def backward(ctx, grad_1THD):
        *tensors, out_1THD, sums_1HT = ctx.saved_tensors
        # Token-major in memory, as the model's own tensors are.
        gradients = [torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in tensors]
        grad_1HTD, out_1HTD = grad_1THD.transpose(1, 2), out_1THD.transpose(1, 2)
        for block in ctx.blocks:
            grad, out, sums = (tensor[:, :, block.start : block.stop] for tensor in (grad_1HTD, out_1HTD, sums_1HT))
            parts = _flash_backward(grad, *_slices(block, *tensors), out, sums, 0.0, block.causal, scale=ctx.scaling)
            for total, part in zip(_slices(block, *gradients), parts, strict=True):
                # Every token is a query and a key of exactly one causal block, and causal blocks are first.
                total.copy_(part) if block.causal else total.add_(part)
        return *gradients, None, None


def _slices(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    keys = slice(block.key_start, block.key_stop)
    return query[:, :, block.start : block.stop], key[:, :, keys], value[:, :, keys]
