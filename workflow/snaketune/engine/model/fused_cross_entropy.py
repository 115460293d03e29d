"""Fused linear cross-entropy: losses of plain linear heads, forward and backward at the speed of matmuls.

Computing gradients in the forward pass, where the loss is a sum, is the method of Liger's fused linear cross entropy (Hsu et
al., 2024) and of torch's `linear_cross_entropy`. Shapes as in `chunked_head`. Between the matmuls there are passes over
the logits of a chunk, [C, V]: eager ones in place, in float32, in a CPU's caches; compiled ones where the model's layers are
compiled on a GPU, which read a 16-bit logit twice and write it once, 6 bytes where eager passes move some 50.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

# Logits per chunk: on a CPU as many as fit into its caches, elsewhere 0.5 GB including the temporaries of eager passes, which
# fused ones lack; used where the head is trained, since each chunk then adds a gradient [V, H].
CHUNK_LOGITS = {"cpu": 2**21, "other": 2**26, "fused": 2**28}
# Maximum number of logits (or their exponentials) saved for the backward pass.
SAVED_LOGITS = 2**25
# Minimum rows per chunk, and what their number is a multiple of: other matmuls are slow.
MIN_CHUNK_ROWS, ROWS = 128, 64


def target_logits(logits_CV: torch.Tensor, begin: int, rows_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the logits [N] of tokens that the C positions from `begin` on predict; 0 for other tokens."""
    offset_N = rows_N - begin
    inside_N = (offset_N >= 0) & (offset_N < len(logits_CV))
    return torch.where(inside_N, logits_CV[offset_N.clamp(0, len(logits_CV) - 1), targets_N].float(), 0.0)


class Passes(NamedTuple):
    """The passes over the logits of a chunk. They may overwrite the logits."""

    # (logits_CV, target_C1) to losses, float32[C, 1], and the gradients of their sum, [C, V].
    loss_and_gradient: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (logits_CV) to highest_C1 and sum_C1, float32: the sum of exp(logits - highest).
    statistics: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (logits_CV, highest_C1, target_C1, off_C1) to exp(logits - highest), less `off` at the target.
    exponentials: Callable[..., torch.Tensor]


def _loss_and_gradient(logits_CV, target_C1) -> tuple[torch.Tensor, torch.Tensor]:
    work_CV = logits_CV.float()
    target_logits_C1 = work_CV.gather(1, target_C1)
    highest_C1, sums_C1 = _statistics(work_CV)
    work_CV.div_(sums_C1).scatter_add_(1, target_C1, torch.full_like(target_logits_C1, -1.0))
    return highest_C1 + sums_C1.log() - target_logits_C1, work_CV.to(logits_CV.dtype)


def _statistics(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return highest logits and sums; overwrites float32 logits with their exponentials."""
    work_CV = logits_CV.float()
    highest_C1 = work_CV.amax(1, keepdim=True)
    return highest_C1, work_CV.sub_(highest_C1).exp_().sum(1, keepdim=True)


def _exponentials(logits_CV, highest_C1, target_C1, off_C1) -> torch.Tensor:
    work_CV = logits_CV.float().sub_(highest_C1).exp_()
    return work_CV.scatter_add_(1, target_C1, -off_C1).to(logits_CV.dtype)


EAGER = Passes(_loss_and_gradient, _statistics, _exponentials)


def _fused_loss_and_gradient(logits_CV, target_C1) -> tuple[torch.Tensor, torch.Tensor]:
    normalizer_C1, ones_C1 = _fused_statistics(logits_CV)
    loss_C1 = normalizer_C1 - logits_CV.gather(1, target_C1).float()
    return loss_C1, _fused_exponentials(logits_CV, normalizer_C1, target_C1, ones_C1)


def _fused_statistics(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-sum-exp instead of the highest logit, so that the sums are 1."""
    normalizer_C1 = logits_CV.float().logsumexp(1, keepdim=True)
    return normalizer_C1, torch.ones_like(normalizer_C1)


def _fused_exponentials(logits_CV, highest_C1, target_C1, off_C1) -> torch.Tensor:
    tokens_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    exponentials_CV = (logits_CV.float() - highest_C1).exp() - torch.where(tokens_V == target_C1, off_C1, 0.0)
    return logits_CV.copy_(exponentials_CV)


@cache
def fused_passes() -> Passes:
    """Return the passes compiled for any number of rows."""
    return Passes(*map(_compiled, (_fused_loss_and_gradient, _fused_statistics, _fused_exponentials)))


def _compiled(function: Callable) -> Callable:
    compiled = torch.compile(function, fullgraph=True)

    def call(*tensors: torch.Tensor):
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return call


class TokenLosses(torch.autograd.Function):
    """Negative log-probabilities of targets under softmax(hidden x weight^T), float32[N].

    With E the exponentials of a position's logits, s their sum and g the gradients of the tokens that the position predicts,
    d loss / d logits = sum(g) / s x E, less g at each token's own index. The factor sum(g) / s is applied to the hidden states,
    so that E enters matmuls only. Where a position predicts one token, s is subtracted from E at its index, in float32: for
    likely tokens the difference is small and would be lost to 16-bit rounding. For the few positions that predict several
    tokens, g is subtracted from the matmuls' results.
    """

    @staticmethod
    def forward(ctx, hidden_UH, weight_VH, rows_N, targets_N, needs_backward, passes):
        """Args: rows_N: index of the hidden state that predicts each token."""
        ctx.passes = passes
        dtype = _matmul_dtype(hidden_UH)
        cast_UH, cast_VH = hidden_UH.to(dtype), weight_VH.to(dtype)
        target_logits_N = torch.zeros(len(targets_N), dtype=torch.float32, device=hidden_UH.device)
        highest_U1, sums_U1 = (target_logits_N.new_empty(len(cast_UH), 1) for _ in range(2))
        target_U1 = torch.zeros(len(cast_UH), 1, dtype=torch.int64, device=hidden_UH.device)
        target_U1[rows_N, 0] = targets_N
        predicted_U1 = torch.zeros_like(highest_U1).index_add_(0, rows_N, torch.ones_like(target_logits_N)[:, None])
        single_U1 = (predicted_U1 == 1).float()
        ctx.rows = _rows_per_chunk(weight_VH, passes, trained=ctx.needs_input_grad[1])
        if not needs_backward:
            ctx.rows = even_rows(len(cast_UH), ctx.rows)
        # Saved chunk by chunk: larger tensors are returned to the system and allocated again.
        saves = needs_backward and passes is EAGER
        ctx.exponentials, saved_rows = [], max(SAVED_LOGITS // len(weight_VH), ctx.rows) if saves else 0
        spare_CV = None
        with torch.autocast(hidden_UH.device.type, enabled=False):
            for begin in range(0, len(cast_UH), ctx.rows):
                hidden_CH, chunk = cast_UH[begin : begin + ctx.rows], slice(begin, begin + ctx.rows)
                if spare_CV is None:
                    spare_CV = cast_UH.new_empty(len(hidden_CH), len(weight_VH))
                logits_CV = torch.mm(hidden_CH, cast_VH.t(), out=spare_CV[: len(hidden_CH)])
                target_logits_N += target_logits(logits_CV, begin, rows_N, targets_N)
                # In float32, where `statistics` overwrites the logits with exponentials.
                work_CV = logits_CV.float() if passes is EAGER else logits_CV
                highest_U1[chunk], sums_U1[chunk] = passes.statistics(work_CV)
                if begin + len(hidden_CH) <= saved_rows:
                    work_CV.scatter_add_(1, target_U1[chunk], -sums_U1[chunk] * single_U1[chunk])
                    ctx.exponentials.append(work_CV.to(dtype))
                    spare_CV = None
        if needs_backward:
            ctx.save_for_backward(hidden_UH, weight_VH, rows_N, targets_N, highest_U1, sums_U1, target_U1, single_U1)
            ctx.dtype = dtype
        return (highest_U1 + sums_U1.log())[:, 0].index_select(0, rows_N) - target_logits_N

    @staticmethod
    def backward(ctx, grad_N):
        hidden_UH, weight_VH, rows_N, targets_N, highest_U1, sums_U1, target_U1, single_U1 = ctx.saved_tensors
        hidden_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        cast_UH, cast_VH = hidden_UH.to(ctx.dtype), weight_VH.to(ctx.dtype)
        factor_U1 = torch.zeros_like(sums_U1[:, 0]).index_add_(0, rows_N, grad_N)[:, None] / sums_U1
        grad_UH = torch.empty_like(cast_UH) if hidden_needs_grad else None
        grad_VH = torch.zeros_like(weight_VH) if weight_needs_grad else None
        exponentials, ctx.exponentials = ctx.exponentials[::-1], []
        with torch.autocast(hidden_UH.device.type, enabled=False):
            for begin in range(0, len(cast_UH), ctx.rows):
                chunk = slice(begin, begin + ctx.rows)
                if exponentials:
                    exponentials_CV = exponentials.pop()
                else:
                    off_C1 = sums_U1[chunk] * single_U1[chunk]
                    logits_CV = cast_UH[chunk] @ cast_VH.t()
                    exponentials_CV = ctx.passes.exponentials(logits_CV, highest_U1[chunk], target_U1[chunk], off_C1)
                if hidden_needs_grad:
                    torch.mm(exponentials_CV, cast_VH, out=grad_UH[chunk])
                if weight_needs_grad:
                    _add_matmul(grad_VH, exponentials_CV.t(), (cast_UH[chunk] * factor_U1[chunk]).to(ctx.dtype))
            # Only positions that predict several tokens remain to be corrected.
            grad_N = grad_N * (1 - single_U1[rows_N, 0])
            if hidden_needs_grad:
                grad_UH = grad_UH.mul_(factor_U1).to(hidden_UH.dtype)
                grad_UH.index_add_(0, rows_N, (weight_VH[targets_N] * -grad_N[:, None]).to(grad_UH.dtype))
            if weight_needs_grad:
                grad_VH.index_add_(0, targets_N, (hidden_UH[rows_N] * -grad_N[:, None]).to(grad_VH.dtype))
        return grad_UH, grad_VH, None, None, None, None


def even_rows(rows: int, most: int) -> int:
    """Return the rows per chunk, `most` at most, that leave no small remainder: matmuls of few rows round otherwise.

    >>> even_rows(257, 256), even_rows(256, 256), even_rows(0, 256)
    (129, 256, 1)
    """
    return max(1, -(-rows // max(1, -(-rows // most))))


def _matmul_dtype(tensor: torch.Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _rows_per_chunk(weight_VH: torch.Tensor, passes: Passes, trained: bool) -> int:
    kind = "fused" if trained and passes is not EAGER else weight_VH.device.type
    rows = CHUNK_LOGITS.get(kind, CHUNK_LOGITS["other"]) // len(weight_VH)
    return max(rows - rows % ROWS, MIN_CHUNK_ROWS)


def _add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matmul to `total` in place; on a GPU, 16-bit factors are accumulated into a float32 total within the matmul."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class SummedLosses(torch.autograd.Function):
    """Sum of the negative log-probabilities of targets under softmax(hidden x weight^T); gradients are computed in the forward.

    With p the probabilities and 1 the target's one-hot vector, d loss / d logits = p - 1, up to the backward pass's factor.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, passes):
        """Return the sum, a float32 scalar; matmuls in autocast's data type, everything else in float32."""
        dtype = _matmul_dtype(hidden_NH)
        hidden_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        rows = _rows_per_chunk(weight_VH, passes, trained=weight_needs_grad)
        cast_NH, cast_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        grad_NH = torch.empty_like(cast_NH) if hidden_needs_grad else None
        grad_VH = torch.zeros_like(weight_VH) if weight_needs_grad else None
        buffer_CV = cast_NH.new_empty(min(rows, len(cast_NH)), len(weight_VH))
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for begin in range(0, len(cast_NH), rows):
                hidden_CH, target_C1 = cast_NH[begin : begin + rows], targets_N[begin : begin + rows, None]
                logits_CV = torch.mm(hidden_CH, cast_VH.t(), out=buffer_CV[: len(hidden_CH)])
                losses_C1, grad_CV = passes.loss_and_gradient(logits_CV, target_C1)
                total += losses_C1.sum()
                if hidden_needs_grad:
                    torch.mm(grad_CV, cast_VH, out=grad_NH[begin : begin + rows])
                if weight_needs_grad:
                    _add_matmul(grad_VH, grad_CV.t(), hidden_CH)
        ctx.gradients = (None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH)
        return total

    @staticmethod
    def backward(ctx, grad):
        """Scale the gradients of the forward pass in place; works once per forward."""
        grad_NH, grad_VH = ctx.gradients
        del ctx.gradients
        return *(None if gradient is None else gradient.mul_(grad) for gradient in (grad_NH, grad_VH)), None, None
