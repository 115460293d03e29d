"""Attention of a CPU over segments, piece by piece: no key is copied, no query runs twice, and no mask is made.

What a segment sees is cut into pieces for torch's flash kernel, each a range of queries against a range of keys, both as
they lie in the row. The pair [abCDEF][GH] that shares abC:

              a b C D E F G H
        abC   x . . . . . . .      own tokens        causal, in halves where there are many of them, for the kernel
        DEF   x x x x . . . .                        computes what causality hides up to 512 keys
          G   x x x . . . x .      the prefix        all of it, one call for each ancestor that holds some of it
          H   x x x . . . x x

A piece gives its queries an output and the logarithm of its sum of exponentials; both together say what the softmax over
several pieces is. Backward, the kernel is told the sum over all pieces, with which each piece's gradients are exact.

Shapes: T tokens, H query heads, K key/value heads, D head size, Q queries of a piece.
"""

from typing import NamedTuple

import numpy as np
import torch

from snaketune.packing.segments import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Piece(NamedTuple):
    """Queries [start, stop) against keys [first, last): each token those up to itself, or all of them all."""

    start: int
    stop: int
    first: int
    last: int
    causal: bool


def pieces_of(rows: Layout) -> tuple[Piece, ...]:
    """What is computed: for every token its causal piece first.

    >>> from snaketune.packing.segments import layout
    >>> for piece in pieces_of(layout([[6, 2]], [[0, 3]], row_lengths=[8])):
    ...     print(*piece)
    0 6 0 6 True
    6 8 6 8 True
    6 8 0 3 False
    """
    starts, stops = rows.starts.tolist(), (rows.starts + rows.lengths).tolist()
    # By where queries end and what they see: a sibling with the same prefix joins in.
    prefixes: dict[tuple[int, int, int], int] = {}
    for segment in np.flatnonzero(rows.prefix_lengths).tolist():
        for keys in _above(rows, segment):
            prefixes[stops[segment], *keys] = prefixes.pop((starts[segment], *keys), starts[segment])
    causal = [Piece(start, stop, start, stop, causal=True) for start, stop in zip(starts, stops)]
    return (*causal, *(Piece(start, stop, *keys, causal=False) for (stop, *keys), start in prefixes.items()))


def _above(rows: Layout, segment: int) -> list[tuple[int, int]]:
    """Where the prefix of a segment lies, from its end to its beginning, what lies end to end as one."""
    found: list[tuple[int, int]] = []
    missing = int(rows.prefix_lengths[segment])
    while missing:
        segment = int(rows.prefix_segments[segment])
        start, above = int(rows.starts[segment]), int(rows.prefix_lengths[segment])
        if missing > above:
            end = start + missing - above
            if found and found[-1][0] == end:
                end = found.pop()[1]
            found.append((start, end))
        missing = min(missing, above)
    return found


def can_attend(query_1HTD: torch.Tensor, value_1KTD: torch.Tensor) -> bool:
    """Whether the kernel takes them: on a CPU, heads of one size."""
    return query_1HTD.device.type == "cpu" and query_1HTD.shape[-1] == value_1KTD.shape[-1]


def attend_by_pieces(
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    pieces: tuple[Piece, ...],
    scaling: float | None,
) -> torch.Tensor:
    """[1, T, H, D]; matrix products in the data type of the values, sums over keys in float32."""
    tensors = (tensor.to(value_1KTD.dtype) for tensor in (query_1HTD, key_1KTD, value_1KTD))
    rows = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    return _Pieces.apply(*rows, pieces, scaling)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_1HTD, key_1KTD, value_1KTD, pieces, scaling):
        _, heads, tokens, size = query_1HTD.shape
        out_1THD = query_1HTD.new_empty(1, tokens, heads, size)
        out_1HTD = out_1THD.transpose(1, 2)
        sums_1HT = query_1HTD.new_empty(1, tokens, heads, dtype=torch.float32).transpose(1, 2)
        for piece in pieces:
            query, key, value = _parts(piece, query_1HTD, key_1KTD, value_1KTD)
            found_1HQD, found_1HQ = _flash(query, key, value, 0.0, piece.causal, scale=scaling)
            own_1HQD = out_1HTD[:, :, piece.start : piece.stop]
            own_1HQ = sums_1HT[:, :, piece.start : piece.stop]
            if piece.causal:
                own_1HQD.copy_(found_1HQD)
                own_1HQ.copy_(found_1HQ)
            else:
                share_1HQ = torch.sigmoid(found_1HQ - own_1HQ)
                own_1HQD.lerp_(found_1HQD, share_1HQ[..., None].to(found_1HQD.dtype))
                torch.logaddexp(own_1HQ, found_1HQ, out=own_1HQ)
        ctx.save_for_backward(query_1HTD, key_1KTD, value_1KTD, out_1THD, sums_1HT)
        ctx.pieces, ctx.scaling = pieces, scaling
        return out_1THD

    @staticmethod
    def backward(ctx, grad_1THD):
        *tensors, out_1THD, sums_1HT = ctx.saved_tensors
        # As the model's own tensors lie: token by token.
        gradients = [torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2) for tensor in tensors]
        grad_1HTD, out_1HTD = grad_1THD.transpose(1, 2), out_1THD.transpose(1, 2)
        for piece in ctx.pieces:
            queries = slice(piece.start, piece.stop)
            found = _flash_backward(
                grad_1HTD[:, :, queries],
                *_parts(piece, *tensors),
                out_1HTD[:, :, queries],
                sums_1HT[:, :, queries],
                0.0,
                piece.causal,
                scale=ctx.scaling,
            )
            for total, part in zip(_parts(piece, *gradients), found, strict=True):
                # Every token is a query and a key of one causal piece, and those come first.
                total.copy_(part) if piece.causal else total.add_(part)
        return *gradients, None, None


def _parts(piece: Piece, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    keys = slice(piece.first, piece.last)
    return query[:, :, piece.start : piece.stop], key[:, :, keys], value[:, :, keys]
